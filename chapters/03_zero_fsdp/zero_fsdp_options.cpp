// The chapter's own options.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::zero_fsdp {

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

std::optional<DType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return name == "bf16"  ? DType::kBF16
         : name == "f16" ? DType::kF16
                         : DType::kF32;
}

DType shortest_dtype(DType parameters, const StrategyOptions& setup) {
  DType shortest = parameters;
  for (const std::string& name : {setup.param_dtype, setup.reduce_dtype}) {
    const DType dtype = dtype_of(name).value_or(parameters);
    if (dtype_bytes(dtype) < dtype_bytes(shortest)) shortest = dtype;
  }
  return shortest;
}

}  // namespace shardbook::zero_fsdp
