#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "chapters/03_zero_fsdp/fsdp/state_dict.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/sharded/loss.h"
#include "core/check.h"
#include "core/context.h"
#include "sim/json_object.h"

namespace shardbook::zero_fsdp {
namespace {

bool is_fsdp(const StrategyOptions& setup) {
  return setup.strategy == "fsdp" || setup.strategy == "fsdp2";
}

/// The dtype with this name; none for "".
std::optional<DType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return dtype_from_name(name);
}

Options checked(const Options& options, const StrategyOptions& setup,
                int ranks) {
  check_even_batch(options, ranks, setup.micro_batches, "--micro-batches");
  const int shard_size = setup.fsdp.shard_size;
  SB_CHECK(setup.sharding_strategy != "hybrid_shard" ||
               (shard_size >= 1 && ranks % shard_size == 0),
           "--shard-size ", shard_size,
           ": hybrid_shard needs a divisor of --world-size ", ranks,
           ", such as the devices of a node");
  SB_CHECK(!setup.zero.accumulate_f32 || dtype_bytes(options.dtype) == 2,
           "--accumulate-f32: gradients of ", dtype_name(options.dtype),
           " are summed as they are; give --dtype bf16 or f16");
  SB_CHECK(is_fsdp(setup) || setup.strategy != "zero1" || !setup.cpu_offload,
           "--cpu-offload: with zero2, zero3, fsdp or fsdp2; stage 1 keeps "
           "whole gradients on the device");
  return options;
}

zero::ZeroOptions zero_options(const Options& options,
                               const StrategyOptions& setup,
                               const ModelConfig& config) {
  zero::ZeroOptions zero = setup.zero;
  zero.stage = setup.strategy.back() - '0';
  zero.clip = options.clip;
  zero.offload_optimizer = setup.cpu_offload;
  zero.offload_parameters = setup.cpu_offload && zero.stage == 3;
  if (!config.has_blocks()) zero.unit_types = {"Linear"};
  const std::int64_t h = config.n_embd;
  if (zero.persistence_threshold < 0) zero.persistence_threshold = 10 * h;
  if (zero.prefetch_bucket_size < 0) zero.prefetch_bucket_size = 9 * h * h / 10;
  if (zero.max_live_parameters < 0) {
    zero.max_live_parameters = std::numeric_limits<std::int64_t>::max();
  }
  return zero;
}

fsdp::FsdpOptions fsdp_options(const Options& options,
                               const StrategyOptions& setup,
                               const ModelConfig& config) {
  using fsdp::BackwardPrefetch;
  using fsdp::ShardingStrategy;
  fsdp::FsdpOptions fsdp = setup.fsdp;
  fsdp.per_parameter = setup.strategy == "fsdp2";
  static const std::map<std::string, ShardingStrategy> kStrategies = {
      {"full_shard", ShardingStrategy::kFullShard},
      {"shard_grad_op", ShardingStrategy::kShardGradOp},
      {"no_shard", ShardingStrategy::kNoShard},
      {"hybrid_shard", ShardingStrategy::kHybridShard}};
  fsdp.sharding_strategy = kStrategies.at(setup.sharding_strategy);
  fsdp.backward_prefetch =
      setup.backward_prefetch == "pre"    ? BackwardPrefetch::kPre
      : setup.backward_prefetch == "post" ? BackwardPrefetch::kPost
                                          : BackwardPrefetch::kNone;
  // The embedding stays with the root: GPT's output uses it again
  if (setup.wrap == "transformer") {
    fsdp.auto_wrap_policy = fsdp::transformer_auto_wrap_policy(
        {config.has_blocks() ? "GptBlock" : "Linear"});
  } else if (setup.wrap == "size") {
    fsdp.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(
        setup.min_num_params, {"GptAttention"}, {"Embedding"});
  }
  fsdp.cpu_offload.offload_params = setup.cpu_offload;
  fsdp.mixed_precision.param_dtype = dtype_of(setup.param_dtype);
  fsdp.mixed_precision.reduce_dtype = dtype_of(setup.reduce_dtype);
  return fsdp;
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add({"--strategy", may_differ::kPlace}, &setup.strategy,
           "what is sharded, and how",
           {"zero1", "zero2", "zero3", "fsdp", "fsdp2"});
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "micro-batches per step", 1);
  line.add({"--recompute", may_differ::kPlace}, &setup.recompute,
           "compute each block's activations again in backward");
  line.add({"--cpu-offload", may_differ::kPlace}, &setup.cpu_offload,
           "shards and optimizer on the host (zero2: optimizer only)");
  // ZeRO
  line.add({"--reduce-bucket-size", may_differ::kSums},
           &setup.zero.reduce_bucket_size,
           "zero1, zero2: elements of gradients that travel together", 1);
  line.add({"--allgather-bucket-size", may_differ::kPlace},
           &setup.zero.allgather_bucket_size,
           "zero1, zero2: elements that are gathered together after a step", 1);
  line.add({"--overlap-comm", may_differ::kPlace}, &setup.zero.overlap_comm,
           "zero1 to zero3: gradients travel while backward runs");
  line.add({"--reduce-scatter", may_differ::kSums}, &setup.zero.reduce_scatter,
           "zero1, zero2: each rank receives its own part; no-: all-reduce");
  line.add({"--round-robin-gradients", may_differ::kPlace},
           &setup.zero.round_robin_gradients,
           "zero1, zero2: neighbouring gradients to different owners");
  line.add("--accumulate-f32", &setup.zero.accumulate_f32,
           "zero2, zero3 in bf16 or f16: sum the gradients of micro-batches in "
           "f32");
  line.add({"--persistence-threshold", may_differ::kPlace},
           &setup.zero.persistence_threshold,
           "zero3: parameters of so many elements stay gathered; -1: ten times "
           "the model's width",
           -1);
  line.add({"--prefetch-bucket-size", may_differ::kPlace},
           &setup.zero.prefetch_bucket_size,
           "zero3: units are gathered ahead while fewer elements than this are "
           "on their way; -1: one unit",
           -1);
  line.add({"--max-live-parameters", may_differ::kPlace},
           &setup.zero.max_live_parameters,
           "zero3: while so many elements are whole, nothing is gathered "
           "ahead; -1: no limit",
           -1);
  line.add({"--max-reuse-distance", may_differ::kPlace},
           &setup.zero.max_reuse_distance,
           "zero3: a block stays whole when fewer elements are fetched before "
           "its next use",
           0);
  line.add({"--sub-group-size", may_differ::kPlace}, &setup.zero.sub_group_size,
           "zero1 to zero3: elements of a shard that are updated together", 1);
  // FSDP
  line.add({"--sharding-strategy", may_differ::kSums}, &setup.sharding_strategy,
           "fsdp: what is freed",
           {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"});
  line.add({"--shard-size", may_differ::kSums}, &setup.fsdp.shard_size,
           "hybrid_shard: ranks that hold one copy together", 1);
  line.add({"--wrap", may_differ::kPlace}, &setup.wrap,
           "fsdp: what becomes a unit", {"transformer", "size", "none"});
  line.add({"--min-num-params", may_differ::kPlace}, &setup.min_num_params,
           "--wrap size: elements of a unit", 1);
  line.add({"--backward-prefetch", may_differ::kPlace},
           &setup.backward_prefetch,
           "fsdp: gather the next unit before or after this one's backward",
           {"pre", "post", "none"});
  line.add({"--forward-prefetch", may_differ::kPlace},
           &setup.fsdp.forward_prefetch,
           "fsdp: gather the next unit before this one's forward");
  line.add({"--limit-all-gathers", may_differ::kPlace},
           &setup.fsdp.limit_all_gathers,
           "fsdp: at most two gathered units ahead");
  line.add("--param-dtype", &setup.param_dtype,
           "fsdp: dtype of computation and gathers", {"f32", "bf16", "f16"});
  line.add("--reduce-dtype", &setup.reduce_dtype,
           "fsdp: dtype of the reductions", {"f32", "bf16", "f16"});
  line.add({"--no-sync", may_differ::kSums}, &setup.no_sync,
           "fsdp: only the last micro-batch reduces");
  line.refuse("--accumulate", "this option is called --micro-batches");
}

void check_given(
    const StrategyOptions& setup,
    const std::vector<std::pair<std::string, std::string>>& given) {
  using Strings = std::vector<std::string>;
  const std::pair<Strings, Strings> owners[] = {
      {{"zero1", "zero2"},
       {"--reduce-bucket-size", "--allgather-bucket-size", "--reduce-scatter",
        "--round-robin-gradients"}},
      {{"zero2", "zero3"}, {"--accumulate-f32"}},
      {{"zero1", "zero2", "zero3"}, {"--overlap-comm", "--sub-group-size"}},
      {{"zero3"},
       {"--persistence-threshold", "--prefetch-bucket-size",
        "--max-live-parameters", "--max-reuse-distance"}},
      {{"fsdp", "fsdp2"},
       {"--sharding-strategy", "--shard-size", "--wrap", "--min-num-params",
        "--backward-prefetch", "--forward-prefetch", "--limit-all-gathers",
        "--param-dtype", "--reduce-dtype", "--no-sync"}}};
  const auto has = [](const Strings& list, const std::string& word) {
    return std::count(list.begin(), list.end(), word) > 0;
  };
  for (const auto& [flag, value] : given) {
    for (const auto& [strategies, flags] : owners) {
      SB_CHECK(!has(flags, flag) || has(strategies, setup.strategy), flag, " ",
               value, ": means nothing to --strategy ", setup.strategy,
               "; it belongs to --strategy ", json_file::list(strategies));
    }
    SB_CHECK(
        flag != "--shard-size" || setup.sharding_strategy == "hybrid_shard",
        flag, " ", value, ": means nothing to --sharding-strategy ",
        setup.sharding_strategy, "; it belongs to hybrid_shard");
    SB_CHECK(flag != "--min-num-params" || setup.wrap == "size", flag, " ",
             value, ": means nothing to --wrap ", setup.wrap,
             "; it belongs to size");
  }
}

DType shortest_dtype(DType parameters, const StrategyOptions& setup) {
  DType shortest = parameters;
  for (const std::string& name : {setup.param_dtype, setup.reduce_dtype}) {
    const DType dtype = dtype_of(name).value_or(parameters);
    if (dtype_bytes(dtype) < dtype_bytes(shortest)) shortest = dtype;
  }
  return shortest;
}

// Under fully_shard, the last ranks have smaller parts if rows do not divide by
// the ranks. ZeRO-2 with offload sends gradients to their owners on the host
// one by one. All other work is cut into equal parts.
FoldClass fold_class(const Options& options, const StrategyOptions& setup) {
  if (setup.strategy == "zero2" && setup.cpu_offload) return each_rank;
  if (setup.strategy != "fsdp2" || setup.sharding_strategy == "no_shard") {
    return one_class;
  }
  RankContext context(Device::meta(0), /*rank=*/0);
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = options.dtype;
  const int d = setup.sharding_strategy == "hybrid_shard"
                    ? std::max(setup.fsdp.shard_size, 1)
                    : options.world_size;
  const auto model = make_model(model_config(options), init);
  const zero::ShardLayout layout =
      zero::row_layout(zero::shapes_of(model->named_parameters()), d);
  std::map<std::vector<std::int64_t>, int> classes;
  std::vector<int> class_of;
  for (int rank = 0; rank < d; ++rank) {
    std::vector<std::int64_t> numels;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      numels.push_back(layout.part(i, rank).numel);
    }
    const int next = static_cast<int>(classes.size());
    class_of.push_back(classes.emplace(numels, next).first->second);
  }
  return [class_of](int rank) {
    return class_of[static_cast<std::size_t>(rank) % class_of.size()];
  };
}

LoadedModel build_on_host(const Options& options, bool recompute) {
  RankContext& context = RankContext::current();
  ContextValue<Device> on_host(&RankContext::device, context.host());
  LoadedModel loaded = build_model(options);
  set_recompute(*loaded.model, recompute);
  return loaded;
}

ZeroFsdpStrategy::ZeroFsdpStrategy(const Options& options,
                                   const StrategyOptions& setup,
                                   ProcessGroup& dp)
    : options_(checked(options, setup, dp.size())),
      setup_(setup),
      dp_(dp),
      loaded_(build_on_host(options, setup.recompute)),
      data_(Dataset::open(options, loaded_.config)) {
  if (is_fsdp(setup)) {
    fsdp_ = std::make_unique<fsdp::FullyShardedDataParallel>(
        *loaded_.model, dp, fsdp_options(options, setup, loaded_.config));
    optimizer_ = make_optimizer(options.optimizer, fsdp_->parameters(),
                                options.optimizer_options);
    return;
  }
  zero_ = zero::make_zero(*loaded_.model, dp,
                          zero_options(options, setup, loaded_.config),
                          options.optimizer, options.optimizer_options);
}

Optimizer& ZeroFsdpStrategy::optimizer() {
  return zero_ ? zero_->optimizer() : *optimizer_;
}

StepResult ZeroFsdpStrategy::step(std::int64_t step) {
  std::optional<fsdp::NoSync> no_sync;
  const auto begin_piece = [&](bool is_last) {
    // FSDP may keep whole gradients up to the last micro-batch
    no_sync.reset();
    if (fsdp_ && setup_.no_sync && !is_last) no_sync.emplace(*fsdp_);
    if (zero_) zero_->set_boundary(is_last);
  };
  Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, setup_.micro_batches, begin_piece,
      [&](const Tensor& inputs) {
        return zero_ ? (*zero_)(inputs) : (*fsdp_)(inputs);
      },
      loss_over_ranks(loaded_.config, *loaded_.model, dp_,
                      setup_.micro_batches));

  StepResult result;
  result.loss = loss.item();
  if (zero_) {
    const std::int64_t skipped = zero_->num_skipped_steps();
    result.grad_norm = zero_->step();
    result.was_skipped = zero_->num_skipped_steps() > skipped;
    return result;
  }
  loss = Tensor();
  result.grad_norm = fsdp_->clip_grad_norm_(
      options_.clip > 0 ? options_.clip
                        : std::numeric_limits<double>::infinity());
  optimizer_->step();
  fsdp_->clear_grad();
  return result;
}

std::vector<NamedTensor> ZeroFsdpStrategy::full_state() {
  if (zero_) return zero_->full_parameters(/*rank0_only=*/true);
  return fsdp::full_state_dict(*fsdp_, {/*offload_to_cpu=*/true,
                                        /*rank0_only=*/true});
}

double ZeroFsdpStrategy::predicted_bytes(const StepPlan& plan) const {
  const double d = dp_.size();
  const double losses =
      static_cast<double>(plan.steps) *
      (2 * (d - 1) / d * 8 + balancing_bytes(loaded_.config, dp_.size()));
  if (!zero_) return losses + zero_fsdp::predicted_bytes(*fsdp_, plan);
  const double loading =
      options_.first_step > 0 ? zero_->predicted_load_bytes() : 0;
  return losses + loading +
         zero_->predicted_bytes(plan.steps, plan.micro_steps);
}

std::vector<Bill> ZeroFsdpStrategy::bills() {
  StepPlan plan;
  plan.steps = options_.steps;
  plan.micro_steps = setup_.micro_batches;
  plan.no_sync = setup_.no_sync;
  Bill bill{predicted_bytes(plan), memory_bill(), kNotPredicted};
  if (!textbook::has_model_times(options_, loaded_.config)) return {bill};
  const auto model =
      textbook::model_times(options_, loaded_.config,
                            static_cast<double>(options_.batch) / dp_.size() /
                                static_cast<double>(setup_.micro_batches),
                            setup_.recompute);
  bill.step_s = zero_ ? zero_->step_s(model, plan.steps, plan.micro_steps)
                      : zero_fsdp::step_s(*fsdp_, plan, model);
  return {bill};
}

std::string ZeroFsdpStrategy::closed_form_command() const {
  return "./shardbook run zero_fsdp -- --world-size 4 --cluster textbook "
         "--strategy " +
         setup_.strategy;
}

MemoryBill ZeroFsdpStrategy::memory_bill() const {
  const std::int64_t rows =
      options_.batch / (dp_.size() * setup_.micro_batches);
  if (zero_) {
    return zero::zero_bill(*zero_, options_, loaded_.config, rows,
                           setup_.recompute);
  }
  // Activations as on one device, in the dtype of the computation
  Options computed = options_;
  computed.dtype = dtype_of(setup_.param_dtype).value_or(options_.dtype);
  MemoryBill bill = states_bill(options_, *fsdp_);
  bill[MemoryKind::kActivation] =
      single_device_bill(computed, loaded_.config, rows,
                         setup_.recompute)[MemoryKind::kActivation];
  return bill;
}

}  // namespace shardbook::zero_fsdp
