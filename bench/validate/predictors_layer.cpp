// Korthikanti et al. 2022, table 4: a layer alone.

#include <fmt/format.h>

#include <map>
#include <tuple>

#include "bench/validate/table_rows.h"

namespace shardbook::validate {

std::vector<Outcome> korthikanti_layer(const Row& row) {
  require(row.says("hardware", "A100-80GB"),
          "no cluster describes " + row.text("hardware"));
  require(row.text("unit") == "one transformer layer",
          "unit " + row.text("unit") + " is not one layer");
  HybridJob job;
  job.cluster = cluster_named("selene+megatron-lm-2022");
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count("seq_len", kMaxSize);
  job.layout.tp = row.count("tp", kMaxSize);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  job.layout.dropout = 0.1;
  const std::string& experiment = row.text("experiment");
  require(experiment != "selective recompute",
          "no chapter recomputes attention alone while all ranks have all "
          "tokens");
  const std::map<std::string, std::pair<bool, Recompute>> experiments = {
      {"baseline no recompute", {false, Recompute::kNothing}},
      {"baseline with full recompute", {false, Recompute::kBlocks}},
      {"sequence parallelism", {true, Recompute::kNothing}},
      {"selective + sequence", {true, Recompute::kAttention}}};
  require(experiments.count(experiment) > 0,
          "experiment " + experiment + " has no chapter");
  std::tie(job.layout.cuts_tokens, job.layout.recompute) =
      experiments.at(experiment);
  const planner::StageRun run =
      planner::run_stage(job.cluster, job.sizes, job.layout, {1});
  const auto outcome = [&](const char* part, const char* column, double seconds,
                           double work) {
    return Outcome{
        fmt::format("{}, {}, {}", row.text("model"), experiment, part),
        "ms",
        {seconds * 1e3, row.positive(column), work},
        sim::trust_name(run.trust)};
  };
  // Work in forwards: a backward is two, and recomputation one more
  const bool is_again = job.layout.recompute == Recompute::kBlocks;
  return {outcome("forward", "forward_ms", run.forward.s, 1),
          outcome("backward", "backward_ms", run.first_backward.s,
                  is_again ? 3 : 2)};
}

}  // namespace shardbook::validate
