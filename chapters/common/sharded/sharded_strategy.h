#pragma once

// A GPT whose parameters lie in parts on the ranks of one group: the training
// that tensor parallelism in every dimension and sequence parallelism share.
//
//   class DdpStrategy : public ShardedStrategy { ... bills() ... };
//
// A chapter provides the layers of a rank and the part of each parameter that
// it holds. Every rank feeds the same token ids [n, S] and targets [n, S] of
// the whole batch, and each layer takes its part of them.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/run/command_line.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook {

/// A chapter's model on one rank.
struct ShardedModel {
  /// They make parameters with init.shards = layout(name, rank). The loss is
  /// the mean over the given batch, the same value on every rank; its backward
  /// gives each rank the gradient of that mean by its own logits.
  LayerFactory layers;
  ParameterLayout layout;
  /// Rows of the token embedding, at least the vocabulary: rows behind it are
  /// never looked up, and their logits do not count. 0: as many as tokens.
  std::int64_t padded_vocabulary = 0;
  /// Sums the gradients that backward leaves as parts of sums. Called after the
  /// last micro-batch; may be empty.
  std::function<void(const std::vector<NamedTensor>& parameters)>
      finish_gradients;
  /// Makes a model that is no GPT; `layers` then gives the loss alone.
  std::function<std::unique_ptr<Module>(const ModelConfig& config,
                                        const InitOptions& init)>
      make = {};
};

/// The model of the options. Throws Error where it is no GPT.
ModelConfig sharded_gpt_config(const ModelOptions& options);

/// How a rank goes through its batch.
struct Passes {
  std::int64_t micro_batches = 1;  ///< per step
  /// Keep the inputs of blocks alone, and compute the blocks again in backward.
  bool recompute = false;
};
/// --micro-batches and --recompute.
void add_passes(CommandLine& line, Passes& passes);

/// The sizes from which the bill of a sharded GPT is computed.
struct ShardedSizes {
  double tokens = 0;  ///< of all ranks, in one micro-batch
  double seq = 0;     ///< S
  double h = 0, heads = 0, layers = 0;
  double positions = 0;          ///< rows of their table
  double vocabulary = 0;         ///< rows of the table, padding included
  double element = 4, stat = 4;  ///< bytes of an element, of a statistic
  double micro_batches = 1;
  bool recompute = false;
  BlockTable block;
  double tables = 1;  ///< of tokens, and of an output layer of its own
};

class ShardedStrategy : public Strategy {
 public:
  /// Builds the rank's part of the model of the options, or loads it (--load).
  /// Throws Error where the chapter does not shard it. Collective.
  ShardedStrategy(const Options& options, ShardedModel sharded,
                  ProcessGroup& group, const Passes& passes = {});

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  /// Collects the parts on rank 0, a parameter at a time.
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;

  const ModelConfig& config() const { return config_; }
  Module& model() { return *model_; }
  const Dataset& data() const { return data_; }

 protected:
  /// Bytes that a rank sends in a step for the norm of the gradient: an
  /// all-reduce of one f64.
  double predicted_norm_bytes() const;
  ShardedSizes sizes() const;
  /// The bill of a rank that holds this many parameters, keeps this many bytes of
  /// activations and sends so many in a step, without the norm.
  Bill bill_of(double parameters, double kept_bytes, double step_bytes) const;

  /// Of the gradients that this rank adds to the norm.
  double norm_of_own_gradients() const;

  const Options options_;
  ProcessGroup& group_;
  const Passes passes_;

 private:
  ShardedModel sharded_;
  ModelConfig config_;
  std::unique_ptr<Module> model_;
  Dataset data_;
  std::unique_ptr<Optimizer> optimizer_;
  /// Parameters whose gradients this rank adds to the norm: those that no lower
  /// rank holds.
  std::vector<NamedTensor> own_;
};

}  // namespace shardbook
