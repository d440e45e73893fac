// Tensor, pipeline and data parallelism together: Megatron-LM's tables, and
// vTrain's measurements.

#include <fmt/format.h>

#include <algorithm>

#include "bench/validate/table_rows.h"
#include "core/check.h"

namespace shardbook::validate {

// Narayanan et al. 2021, table 1.
std::vector<Outcome> sc21_table1(const Row& row) {
  const HybridJob job = sc21_table1_job(row);
  return {tflops_outcome(row.text("model"), job, row)};
}

// The same models with the software of three months before. The picture prints
// no micro-batches: they are those of the later table.
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
  HybridJob job = megatron_job(row, "selene-2022");
  set_mesh(row, job, "interleave_v");
  set_micro_batches(row, job);
  const std::string& mode = row.text("mode");
  if (mode == "SP + selective recompute") {
    job.layout.cuts_tokens = true;
    job.layout.recompute = Recompute::kAttention;
  } else if (mode != "full recompute, no SP") {
    throw NotExpressed("mode " + mode + " has no chapter");
  }
  Outcome outcome = time_outcome(
      describe(row.text("model") + ", " + mode, job), job, hybrid_step(job),
      "s", 1, row.positive("iter_time_s"), recomputed_flops(job));
  outcome.pair.contest = row.text("model");
  return {outcome};
}

// VIA-Research/vTrain: one node of A100s.
std::vector<Outcome> vtrain(const Row& row) {
  if (row.text("gpu") != "A100" || row.text("schedule") != "1F1B") {
    throw NotExpressed("no cluster and schedule for " + row.text("gpu") + ", " +
                       row.text("schedule"));
  }
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
