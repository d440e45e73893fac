// Megatron-LM's tables and vTrain's measurements: tensor parallelism, with and
// without cut tokens, then with pipelines and replicas.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "bench/validate/table_rows.h"
#include "core/check.h"

namespace shardbook::validate {

// Megatron-LM of 2020, weak scaling.
std::vector<Outcome> megatron_2020(const Row& row) {
  const std::string& hardware = row.text("hardware");
  const bool is_a100 = hardware == "DGX-A100";
  require(is_a100 || row.says("hardware", "V100"),
          "no cluster describes " + hardware);
  // DGX A100 with Megatron-LM's software
  HybridJob job = megatron_job(row, is_a100 ? "selene" : "dgx2-v100");
  set_degrees(row, row.count("tp", kMaxSize), 1, 1, job);
  require(job.dp == 1 || job.layout.tp == 1,
          "no chapter joins tensor and data parallelism yet");
  const int batch = row.count("global_batch");
  SB_CHECK(batch % job.dp == 0, row.place(), ": global_batch is ", batch,
           ", which does not divide by dp ", job.dp);
  job.layout.micro_batch = batch / job.dp;
  if (!row.begins("activation_recompute", "full")) {
    job.layout.recompute = Recompute::kNothing;
  }
  const StepTime time = job.dp > 1          ? with_ddp(job)
                        : job.layout.tp > 1 ? with_tensor(job)
                                            : on_one_device(job);
  return {time_outcome(describe_on_gpus(row.text("case") + " " + hardware, job),
                       job, time, "ms", 1e3, row.positive("iter_time_ms"),
                       recomputed_flops(job))};
}

// Korthikanti et al. 2022, table 4.
std::vector<Outcome> korthikanti_layer(const Row& row) {
  expect_selene(row);
  require(row.text("unit") == "one transformer layer",
          "unit " + row.text("unit") + " is not one layer");
  HybridJob job;
  job.cluster = cluster_named("selene+megatron-lm-2022");
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count("seq_len", kMaxSize);
  job.layout.tp = row.count("tp", kMaxSize);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  job.layout.dropout = kMegatronDropout;
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
  return {outcome("forward", "forward_ms", run.forward_s, 1),
          outcome("backward", "backward_ms", run.first_backward_s,
                  is_again ? 3 : 2)};
}

// Narayanan et al. 2021, table 1.
std::vector<Outcome> sc21_table1(const Row& row) {
  const HybridJob job = sc21_table1_job(row);
  return {tflops_outcome(row.text("model"), job, row)};
}

// The same models with software three months older. The picture gives no
// micro-batches: the later table's are used.
std::vector<Outcome> january_2021(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row);
  const int model_parallel = row.count("model_parallel_size", 1 << 16);
  const int tp = std::min(model_parallel, job.cluster.devices_per_node);
  SB_CHECK(model_parallel % tp == 0, row.place(), ": model_parallel_size is ",
           model_parallel, ", which is no multiple of ", tp);
  set_degrees(row, tp, model_parallel / tp, 1, job);
  job.layout.micro_batch = job.sizes.hidden <= 4096    ? 16
                           : job.sizes.hidden <= 6144  ? 8
                           : job.sizes.hidden <= 8192  ? 4
                           : job.sizes.hidden <= 12288 ? 2
                                                       : 1;
  set_micro_batches(row, job);
  return {tflops_outcome(row.text("model"), job, row)};
}

// Korthikanti et al. 2022, table 5.
std::vector<Outcome> korthikanti_step(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row, "selene+megatron-lm-2022");
  set_mesh(row, job, "interleave_v");
  set_micro_batches(row, job);
  const std::string& mode = row.text("mode");
  const bool is_selective = mode == "SP + selective recompute";
  require(is_selective || mode == "full recompute, no SP",
          "mode " + mode + " has no chapter");
  job.layout.cuts_tokens = is_selective;
  if (is_selective) job.layout.recompute = Recompute::kAttention;
  Outcome outcome = time_outcome(
      describe(row.text("model") + ", " + mode, job), job, hybrid_step(job),
      "s", 1, row.positive("iter_time_s"), recomputed_flops(job));
  outcome.pair.contest = row.text("model");
  return {outcome};
}

// VIA-Research/vTrain: one node of A100s.
std::vector<Outcome> vtrain(const Row& row) {
  require(row.text("gpu") == "A100" && row.text("schedule") == "1F1B",
          "no cluster and schedule for " + row.text("gpu") + ", " +
              row.text("schedule"));
  HybridJob job =
      megatron_job(row, "vtrain-a100", kMegatronVocabulary, "seq_len_tokens");
  if (row.text("activation_recompute") != "full") {
    job.layout.recompute = Recompute::kNothing;
  }
  set_mesh(row, job, "", "micro_batch_seqs");
  job.micro_batches =
      row.count("num_microbatches_per_replica", kMaxMicroBatchesPerRank);
  Outcome outcome = time_outcome(
      fmt::format("{}: {} layers, ", row.text("row_id"), job.layers) +
          describe("", job),
      job, hybrid_step(job), "ms", 1e3, row.positive("iter_time_ms"),
      model_flops(job));
  outcome.pair.contest =
      fmt::format("{} layers, {} GPUs, batch {}", job.layers, job.ranks(),
                  row.text("global_batch_seqs"));
  return {outcome};
}

}  // namespace shardbook::validate
