// The chapter's own options.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::zero_fsdp {

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add("--strategy", &setup.strategy, "what is sharded, and how",
           {"zero1", "zero2", "zero3", "fsdp", "fsdp2"})
      .may_differ(may_differ::kPlace);
  line.add("--micro-batches", &setup.micro_batches, "micro-batches per step", 1)
      .may_differ(may_differ::kSums);
  line.add("--recompute", &setup.recompute,
           "compute each block's activations again in backward")
      .may_differ(may_differ::kPlace);
  line.add("--cpu-offload", &setup.cpu_offload,
           "shards and optimizer on the host (zero2: optimizer only)")
      .may_differ(may_differ::kPlace);
  // ZeRO
  line.add("--reduce-bucket-size", &setup.zero.reduce_bucket_size,
           "zero1, zero2: elements of gradients that travel together", 1)
      .may_differ(may_differ::kSums);
  line.add("--allgather-bucket-size", &setup.zero.allgather_bucket_size,
           "zero1, zero2: elements that are gathered together after a step", 1)
      .may_differ(may_differ::kPlace);
  line.add("--overlap-comm", &setup.zero.overlap_comm,
           "zero1 to zero3: gradients travel while backward runs")
      .may_differ(may_differ::kPlace);
  line.add("--reduce-scatter", &setup.zero.reduce_scatter,
           "zero1, zero2: each rank receives its own part; no-: all-reduce")
      .may_differ(may_differ::kSums);
  line.add("--round-robin-gradients", &setup.zero.round_robin_gradients,
           "zero1, zero2: neighbouring gradients to different owners")
      .may_differ(may_differ::kPlace);
  line.add("--accumulate-f32", &setup.zero.accumulate_f32,
           "zero2, zero3 in bf16 or f16: sum the gradients of micro-batches in "
           "f32");
  line.add("--persistence-threshold", &setup.zero.persistence_threshold,
           "zero3: parameters of so many elements stay gathered; -1: ten times "
           "the model's width",
           -1)
      .may_differ(may_differ::kPlace);
  line.add("--prefetch-bucket-size", &setup.zero.prefetch_bucket_size,
           "zero3: units are gathered ahead while fewer elements than this are "
           "on their way; -1: one unit",
           -1)
      .may_differ(may_differ::kPlace);
  line.add("--max-live-parameters", &setup.zero.max_live_parameters,
           "zero3: while so many elements are whole, nothing is gathered "
           "ahead; -1: no limit",
           -1)
      .may_differ(may_differ::kPlace);
  line.add("--max-reuse-distance", &setup.zero.max_reuse_distance,
           "zero3: a block stays whole when fewer elements are fetched before "
           "its next use",
           0)
      .may_differ(may_differ::kPlace);
  line.add("--sub-group-size", &setup.zero.sub_group_size,
           "zero1 to zero3: elements of a shard that are updated together", 1)
      .may_differ(may_differ::kPlace);
  // FSDP
  line.add("--sharding-strategy", &setup.sharding_strategy,
           "fsdp: what is freed",
           {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"})
      .may_differ(may_differ::kSums);
  line.add("--shard-size", &setup.fsdp.shard_size,
           "hybrid_shard: ranks that hold one copy together", 1)
      .may_differ(may_differ::kSums);
  line.add("--wrap", &setup.wrap, "fsdp: what becomes a unit",
           {"transformer", "size", "none"})
      .may_differ(may_differ::kPlace);
  line.add("--min-num-params", &setup.min_num_params,
           "--wrap size: elements of a unit", 1)
      .may_differ(may_differ::kPlace);
  line.add("--backward-prefetch", &setup.backward_prefetch,
           "fsdp: gather the next unit before or after this one's backward",
           {"pre", "post", "none"})
      .may_differ(may_differ::kPlace);
  line.add("--forward-prefetch", &setup.fsdp.forward_prefetch,
           "fsdp: gather the next unit before this one's forward")
      .may_differ(may_differ::kPlace);
  line.add("--limit-all-gathers", &setup.fsdp.limit_all_gathers,
           "fsdp: at most two gathered units ahead")
      .may_differ(may_differ::kPlace);
  line.add("--param-dtype", &setup.param_dtype,
           "fsdp: dtype of computation and gathers", {"f32", "bf16", "f16"});
  line.add("--reduce-dtype", &setup.reduce_dtype,
           "fsdp: dtype of the reductions", {"f32", "bf16", "f16"});
  line.add("--no-sync", &setup.no_sync,
           "fsdp: only the last micro-batch reduces")
      .may_differ(may_differ::kSums);
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
