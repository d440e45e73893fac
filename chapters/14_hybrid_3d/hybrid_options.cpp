// The chapter's own options.

#include "chapters/06_1f1b/schedules.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/pipeline/partition.h"

namespace shardbook::hybrid {

void add_options(CommandLine& line, HybridOptions& setup) {
  line.add({"--dp", may_differ::kRanks}, &setup.dp,
           "replicas; 0: as many as the other degrees leave");
  line.add({"--tp", may_differ::kRanks}, &setup.tp,
           "ranks that share every layer", 1);
  line.add({"--pp", may_differ::kRanks}, &setup.pp,
           "ranks that share the layers, in stages", 1);
  line.add({"--cp", may_differ::kRanks}, &setup.cp,
           "ranks that share every sequence", 1);
  line.add({"--order", may_differ::kRanks}, &setup.order, kOrderHelp);
  line.add({"--zero-stage", may_differ::kPlace}, &setup.zero_stage,
           "shards over dp and cp: 1 optimizer state, 2 gradients as well, 3 "
           "parameters as well (2 and 3 without --pp)",
           0, 3);
  line.add({"--sequence-parallel", may_differ::kSums}, &setup.sequence_parallel,
           "cut tokens inside the tp group, too (Megatron-LM)");
  line.add({"--cp-kind", may_differ::kSums}, &setup.cp_kind,
           "how queries meet keys over cp", {"ring", "rsa", "ulysses"});
  line.add({"--cp-layout", may_differ::kSums}, &setup.cp_layout,
           "which tokens a rank of cp holds",
           {"contiguous", "zigzag", "striped"});
  std::string names;
  for (const std::string& name : pipeline::schedules::schedule_names()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  line.add({"--schedule", may_differ::kSums}, &setup.schedule, names);
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "equal pieces of a replica's part of the batch", 1, 1 << 20);
  line.add({"--chunks", may_differ::kPlace}, &setup.chunks,
           "interleaved: stages per rank", 2);
  line.add({"--partition", may_differ::kPlace}, &setup.partition,
           kPartitionHelp);
  line.add_mode({"--recompute", may_differ::kPlace}, &setup.recompute,
                "what runs forward again before its backward: a whole stage, "
                "its blocks one by one, attention alone",
                {"always", "except_last", "never", "blocks", "attention"});
  line.add_bytes({"--bucket-bytes", may_differ::kSums}, &setup.bucket_bytes,
                 "gradients travel in buckets of about this size");
  line.add({"--overlap-grad-reduce", may_differ::kSums},
           &setup.overlap_grad_reduce,
           "a bucket leaves while backward goes on, once the last micro-batch "
           "has filled it (Megatron-LM)");
  line.add("--num-experts", &setup.experts,
           "experts of each layer in the place of its MLP; 1: none", 1,
           1 << 20);
  line.add({"--ep", may_differ::kRanks}, &setup.ep,
           "replicas that share a set of experts", 1);
  line.add("--top-k", &setup.top_k, "experts that a token visits", 1);
  line.add("--capacity-factor", &setup.capacity_factor,
           "slots of an expert, as a multiple of an even load", 0.01);
  line.add({"--expert-tp", may_differ::kRanks}, &setup.expert_tp,
           "tp cuts experts' hidden units, not their slots");
  line.add("--aux-coefficient", &setup.aux_coefficient,
           "of the loss that balances the load of experts");
  line.add("--noise", &setup.noise, "noise in the gates of experts",
           moe::noise_names());
  line.add("--accumulate-f32", &setup.accumulate_f32,
           "bf16, f16: sum the gradients of micro-batches in f32");
  line.add("--loss-scale", &setup.loss_scale.scale,
           "f16: the first factor of the loss", 1);
  line.add("--loss-scale-window", &setup.loss_scale.window,
           "f16: good steps before the factor doubles", 1);
  line.add("--hysteresis", &setup.loss_scale.hysteresis,
           "f16: overflows up to the one that halves the factor", 1);
  line.add("--scaler", &setup.scaler, "f16: whose sequence of factors",
           {"deepspeed", "deepspeed-0.17.1", "megatron"});
}

}  // namespace shardbook::hybrid
