#pragma once

// From the gradients of one rank to new parameters on all of them.
//
//   engine.run();            // this rank's gradients, of its own samples
//   update.reduce();         // sums over replicas, tokens, stages
//   update.sum_of_squares(); // this rank's share of the norm
//   update.apply(factor);    // clipped, and by the optimizer
//
// A parameter's gradient is a sum over up to three groups, in this order:
//
//   dp x cp   the other samples, the other tokens: every parameter. Experts: only
//             the ranks that hold the same ones (edp x cp, and tp where it cuts
//             slots); an all-to-all has brought them the tokens of the others
//   tp        tokens that Megatron's sequence parallelism has cut: parameters
//             that the tp group holds whole (norms, biases of rows, positions)
//   pp        other stages that use the parameter (the token embedding)
//
// Parameters that share these groups travel in buckets. ZeRO-1 (Megatron's
// distributed optimizer) scatters a bucket's first sum over dp x cp, and goes on
// with this rank's shard: its sums over tp and pp, its update, and a gather of
// new parameters. For that the shards of all members must have the same limits:
// the token embedding has buckets of its own, or the other stage's shard would
// hold other elements.
//
// With overlap_grad_reduce, the first sum of a bucket begins while backward goes
// on (FullBuckets), and reduce() waits for it. Its buckets hold parameters of
// one stage, since the stages of a rank end their backwards at different times.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/02_ddp/unused_parameters.h"
#include "chapters/03_zero_fsdp/flat_buffer.h"
#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/training_state.h"
#include "comm/device_mesh.h"

namespace shardbook::hybrid {

/// Parameters whose gradients are summed over the same groups.
struct UpdateBucket {
  std::vector<NamedTensor> parameters;
  /// The ranks that hold the same parameters, and other samples or tokens.
  ProcessGroup* data = nullptr;
  /// The stages that share them; null for parameters of one stage.
  std::shared_ptr<ProcessGroup> tied;
  bool is_replicated = false;  ///< the tp group holds them whole
  bool is_partial = false;     ///< and their gradients are summed over it
  /// This rank adds them to the norm: no other rank that has them does.
  bool counts = false;
  /// With overlap_grad_reduce: the first stage of this rank that has them.
  int stage = 0;

  // With ZeRO-1
  zero::FlatLayout layout;
  Tensor flat;  ///< [padded]; the parameters are views of it
  Tensor own;   ///< [S], this rank's part
  Tensor grad;  ///< [S], during the update

  // While the first sum is under way
  Tensor sent;
  Work work;

  /// Size of a gradient's element: 4 where 16-bit ones are summed in f32.
  double gradient_bytes = 0;

  /// Elements that this rank's optimizer updates.
  std::int64_t updated_numel() const;
  std::int64_t numel() const;
};

/// Which buckets of gradients may leave while backward goes on.
///
///   micro-batch 0, 1, 2    gradients are added; nothing may leave
///   micro-batch 3          h.3 | h.2 | h.1 | h.0
///   network                    | bucket of h.2 and h.3 | bucket of h.0 and h.1
///
/// A bucket is full when the last micro-batch has added all its gradients to
/// each of its parameters. That may be more than one: under DualPipe, a stage
/// ends with a B in one direction, and an I and a W in the other, and a rank with
/// the first and the last stage has the tied embedding in both. The first step
/// counts them, as DDP does for a static graph, so in it no bucket leaves before
/// the end.
///
/// All replicas of a stage must send in the same order: the one in which the
/// buckets were full in the first step. Replicas run the same schedule, so they
/// agree on it.
class FullBuckets {
 public:
  /// `bucket_of`: by parameter. A bucket without parameters never leaves.
  FullBuckets(std::vector<std::size_t> bucket_of, std::size_t num_buckets);

  /// The last micro-batch has added a gradient to the parameter. Returns the
  /// buckets that leave now, in order.
  std::vector<std::size_t> count(std::size_t parameter);
  /// Backward has ended. Returns the buckets that have not left, in order.
  std::vector<std::size_t> end_step();

 private:
  std::vector<std::size_t> bucket_of_;
  ddp::StaticGraph gradients_;
  std::vector<int> num_incomplete_;  ///< parameters, by bucket
  /// By bucket: when its last gradient came in the first step.
  std::vector<std::size_t> filled_;
  std::size_t num_counted_ = 0;
  /// Buckets as they leave; in the first step, by number.
  std::vector<std::size_t> order_;
  bool is_first_step_ = true;
  std::size_t next_ = 0;
};

class Update {
 public:
  /// Collective over the groups. Parameters become views of buckets with
  /// ZeRO-1.
  Update(const Options& options, const HybridOptions& setup,
         PipelineModel& model, const RankLayers& layers, const Groups& groups);

  /// Sends each bucket as soon as it is full. `adds_last`: whether the backward
  /// under way adds its stage's last gradients. Call it before the first step.
  void overlap(const std::function<bool()>& adds_last);
  /// Sums the gradients. Order of collectives: all buckets over dp x cp, then
  /// over tp, then over stages (Megatron-LM, finalize_model_grads.py).
  void reduce();
  /// Over the gradient's elements that no other rank counts. The sum over the
  /// world is the square of the norm.
  double sum_of_squares() const;
  /// Updates with `factor` times the gradient, and gives every rank the new
  /// parameters (ZeRO-1). Forgets the gradients.
  void apply(double factor);
  /// Forgets the gradients without an update.
  void forget();
  /// Adds the tensors that this rank updates, and their optimizer state.
  void add_to(TrainingState& state);
  /// Gives every rank the parameters that were loaded into shards (ZeRO-1).
  void gather();

  ~Update();
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;

  Optimizer& optimizer() { return *optimizer_; }
  const std::vector<UpdateBucket>& buckets() const { return buckets_; }
  bool is_sharded() const { return is_sharded_; }

 private:
  void make_buckets(PipelineModel& model, const RankLayers& layers,
                    const HybridOptions& setup);
  void sum_in_f32();
  /// Begins the first sum of a bucket.
  void send(UpdateBucket& bucket);
  Tensor gradient(const NamedTensor& parameter) const;
  Tensors gradients_of(const UpdateBucket& bucket) const;

  Groups groups_;
  bool is_sharded_;
  std::vector<UpdateBucket> buckets_;
  std::unique_ptr<Optimizer> optimizer_;
  /// With accumulate_f32: sums of gradients in f32, by parameter.
  std::map<std::string, Tensor> sums_;
  /// Parameters, and the keys of their hooks.
  std::vector<std::pair<Tensor, int>> hooks_;
  /// With overlap_grad_reduce.
  std::optional<FullBuckets> full_;
};

}  // namespace shardbook::hybrid
