// The chapter's own options, and the table of those that go together.

#include <algorithm>
#include <sstream>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/pipeline/partition.h"

namespace shardbook::hybrid {

void add_options(CommandLine& line, HybridOptions& setup) {
  line.add("--dp", &setup.dp, "replicas; 0: as many as the other degrees leave")
      .may_differ(may_differ::kRanks);
  line.add("--tp", &setup.tp, "ranks that share every layer", 1)
      .may_differ(may_differ::kRanks);
  line.add("--pp", &setup.pp, "ranks that share the layers, in stages", 1)
      .may_differ(may_differ::kRanks);
  line.add("--cp", &setup.cp, "ranks that share every sequence", 1)
      .may_differ(may_differ::kRanks);
  line.add("--order", &setup.order, kOrderHelp).may_differ(may_differ::kRanks);
  line.add("--zero-stage", &setup.zero_stage,
           "shards over dp and cp: 1 optimizer state, 2 gradients as well, 3 "
           "parameters as well (2 and 3 without --pp)",
           0, 3)
      .may_differ(may_differ::kPlace);
  line.add("--sequence-parallel", &setup.sequence_parallel,
           "cut tokens inside the tp group, too (Megatron-LM)")
      .may_differ(may_differ::kSums);
  line.add("--cp-kind", &setup.cp_kind, "how queries meet keys over cp",
           {"ring", "rsa", "ulysses"})
      .may_differ(may_differ::kSums);
  line.add("--cp-layout", &setup.cp_layout, "which tokens a rank of cp holds",
           {"contiguous", "zigzag", "striped"})
      .may_differ(may_differ::kSums);
  std::string names;
  for (const std::string& name : pipeline::schedules::schedule_names()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  line.add("--schedule", &setup.schedule, names).may_differ(may_differ::kSums);
  line.add("--micro-batches", &setup.micro_batches,
           "equal pieces of a replica's part of the batch", 1, 1 << 20)
      .may_differ(may_differ::kSums);
  line.add("--chunks", &setup.chunks, "interleaved: stages per rank", 2)
      .may_differ(may_differ::kPlace);
  line.add("--partition", &setup.partition, kPartitionHelp)
      .may_differ(may_differ::kPlace);
  line.add_mode("--recompute", &setup.recompute,
                "what runs forward again before its backward: a whole stage, "
                "its blocks one by one, attention alone",
                {"always", "except_last", "never", "blocks", "attention"})
      .may_differ(may_differ::kPlace);
  line.add_bytes("--bucket-bytes", &setup.bucket_bytes,
                 "gradients travel in buckets of about this size")
      .may_differ(may_differ::kSums);
  line.add("--overlap-grad-reduce", &setup.overlap_grad_reduce,
           "a bucket leaves while backward goes on, once the last micro-batch "
           "has filled it (Megatron-LM)")
      .may_differ(may_differ::kSums);
  line.add("--num-experts", &setup.experts,
           "experts of each layer in the place of its MLP; 1: none", 1,
           1 << 20);
  line.add("--ep", &setup.ep, "replicas that share a set of experts", 1)
      .may_differ(may_differ::kRanks);
  line.add("--top-k", &setup.top_k, "experts that a token visits", 1);
  line.add("--capacity-factor", &setup.capacity_factor,
           "slots of an expert, as a multiple of an even load", 0.01);
  line.add("--expert-tp", &setup.expert_tp,
           "tp cuts experts' hidden units, not their slots")
      .may_differ(may_differ::kRanks);
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

// --- Which axes and stages of ZeRO go together -------------------------------

namespace {

/// The options of one column of the table.
struct Column {
  int ep;
  std::int64_t experts;
  const char* model;
};
constexpr Column kColumns[] = {
    {1, 1, "gpt-nano"}, {2, 8, "gpt-nano"}, {1, 1, "resnet18"}};

}  // namespace

std::string combinations_text() {
  std::ostringstream text;
  std::vector<std::string> reasons;
  text << std::string(18, ' ')
       << "without experts   experts over ep   image models\n"
       << "axes above 1 ZeRO   0   1   2   3     0   1   2   3     0   1   2   "
          "3\n";
  for (int set = 0; set < 16; ++set) {
    HybridOptions setup;
    std::string axes;
    const auto degree = [&](int bit, const char* name) {
      if ((set >> bit & 1) == 0) return 1;
      axes += (axes.empty() ? "" : " x ") + std::string(name);
      return 2;
    };
    const int dp = degree(0, "dp");
    setup.tp = degree(1, "tp");
    setup.cp = degree(2, "cp");
    setup.pp = degree(3, "pp");
    if (axes.empty()) axes = "none";
    axes.resize(17, ' ');
    text << axes;
    for (const Column& column : kColumns) {
      setup.ep = column.ep;
      setup.experts = column.experts;
      setup.dp = dp * setup.ep;
      if (&column != kColumns) text << "  ";
      for (setup.zero_stage = 0; setup.zero_stage < 4; ++setup.zero_stage) {
        Options options;
        options.model = column.model;
        options.world_size = setup.dp * setup.tp * setup.cp * setup.pp;
        options.batch = 4 * setup.dp * setup.micro_batches;
        const std::string reason = refusal(options, setup);
        std::string cell = "yes";
        if (!reason.empty()) {
          const auto found = std::find(reasons.begin(), reasons.end(), reason);
          cell = "[" + std::to_string(found - reasons.begin() + 1) + "]";
          if (found == reasons.end()) reasons.push_back(reason);
        }
        text << std::string(4 - cell.size(), ' ') << cell;
      }
    }
    text << "\n";
  }
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    text << "[" << i + 1 << "] " << reasons[i] << "\n";
  }
  return text.str();
}

}  // namespace shardbook::hybrid
