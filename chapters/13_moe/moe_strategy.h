#pragma once

// A GPT of experts on an expert-data-tensor mesh, for program.cpp and the benchmarks.
//
//   form        dense parameters              experts
//   E           replicated, summed over DP    one set over all ranks
//   E + D       the same                      EP inside, summed over EDP
//   E + Z       ZeRO over DP                  EP, ZeRO over EDP
//   E + D + M   cut over TP                   EP over ranks of equal TP rank
//   E + Z + M   both; with offload, the optimizer is on the host
//
// Each rank's loss is the mean over its own tokens, so every gradient is divided
// by the number of data-parallel ranks: the experts' too, although only dp / ep
// ranks sum them: the all-to-all has already brought the tokens of ep ranks.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/13_moe/expert_update.h"
#include "chapters/13_moe/groups.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/training.h"
#include "chapters/common/run/worlds.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook::moe {

struct StrategyOptions {
  MoeOptions moe;
  /// Ranks that share a set of experts; 0: as many as divide experts and
  /// data-parallel ranks.
  int ep = 0;
  int tp = 1;
  bool data_before_expert = false;
  /// 0: all-reduce; 1 or 2: ZeRO, dense parameters over DP, experts over EDP.
  int zero_stage = 0;
  bool cpu_offload = false;  ///< stage 2: the optimizer on the host
  std::int64_t micro_batches = 1;
  /// f16: the factor of the loss; the update works on f32 masters at stage 0 as
  /// well. None: the loss is not scaled.
  std::optional<LossScaleOptions> loss_scale = {};
};

void add_options(CommandLine& line, StrategyOptions& setup);
/// The config of a Mixtral or a Qwen3-MoE decides about its experts: sets them in
/// `moe`. Throws Error for a Llama without experts, and for an option of `line`
/// that contradicts.
void take_experts(const CommandLine& line, const ModelOptions& options,
                  MoeOptions& moe);
/// Throws Error for options that do not go together.
void check_strategy_options(const Options& options,
                            const StrategyOptions& setup);
/// The sizes of the mesh, with `ep` chosen.
GroupSizes group_sizes(const Options& options, const StrategyOptions& setup);

class MoeStrategy : public Strategy {
 public:
  /// `mesh` has the axes of expert_topology. Throws Error for sizes that do not
  /// divide. Collective.
  MoeStrategy(const Options& options, const StrategyOptions& asked,
              DeviceMesh& mesh);

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override;
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run moe -- --world-size 4 --cluster textbook";
  }
  /// False where shapes depend on the routing, or f16 has skipped a step.
  bool has_predictable_time() const override;
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;
  /// With all experts on one device. The file does not record how many there are:
  /// give --num-experts again to load it.
  LoadedModel whole_model(const Options& options,
                          const std::vector<NamedTensor>& state) override;
  /// The groups, and the load of each expert. Collective.
  std::string remarks() override;
  /// The load of each expert, for report.html. Collective.
  std::vector<std::pair<std::string, std::string>> more() override;

  Module& model() { return *model_; }
  const ModelConfig& config() const { return config_; }
  const MoeRecord& record() const { return *record_; }
  /// Choices per expert of each layer, over all ranks. Collective.
  std::map<std::string, std::vector<std::int64_t>> global_loads();

 private:
  /// The part of a parameter that a rank of the world holds.
  Shards layout(const std::string& name, int rank) const;
  void make_update();

  const Options options_;
  StrategyOptions setup_;  ///< as asked, with ep chosen
  DeviceMesh& mesh_;
  ProcessGroup& dp_;
  /// Ranks with the same expert parameters: EDP, and TP where it cuts rows.
  ProcessGroup& replicas_;
  const ParameterLayout layout_ = [this](const std::string& name, int rank) {
    return layout(name, rank);
  };
  ModelConfig config_;
  Dataset data_;
  std::shared_ptr<MoeRecord> record_;
  LayerFactory layers_;
  std::unique_ptr<Gpt> model_;
  std::unique_ptr<ExpertUpdate> update_;
  std::optional<DynamicLossScaler> scaler_;
};

// --- One device ------------------------------------------------------------------
//
// Capacity and drops depend on the tokens that are routed together, so it routes
// each group of tokens by itself, as the ranks do.

/// Where ranks divide gradients.
struct RankDivision {
  /// Pieces in a row whose gradients a rank sums before it divides them by dp;
  /// 0: gradients are sums of shares.
  std::size_t pieces = 0;
  int dp = 1;
  /// An expert has the tokens of as many ranks, which follow each other.
  int ep = 1;
};
/// Trains a GPT of these layers in these pieces of the batch, which are equally
/// large. Each piece is routed by itself; where the layers route it in `groups`
/// equal parts, the gates' losses of each part count 1 / `groups`. In f16 the
/// losses are scaled by `scaler`, and steps that overflow are skipped.
/// `division` says where gradients are divided.
ReferenceRun train_reference(const Options& options, const LayerFactory& layers,
                             MoeRecord& record,
                             const std::vector<MicroBatch>& pieces,
                             int groups = 1,
                             DynamicLossScaler scaler = DynamicLossScaler({1}),
                             const RankDivision& division = {});

/// A GPT with `experts` top-1 experts in each block, without capacity and without
/// auxiliary losses.
ReferenceRun train_dropless(const Options& options, int experts);

/// The model with all of its experts, for --save and --logits.
LoadedModel whole_model(const Options& options, const MoeOptions& moe,
                        const std::vector<NamedTensor>& state);

/// Reference run for the groups of these options: each rank's micro-batches.
ReferenceRun train_reference(const Options& options,
                             const StrategyOptions& setup);
/// Ranks that the `sim` world may run once.
FoldClass fold_class(const Options& options, const StrategyOptions& setup);

}  // namespace shardbook::moe
