#include "bench/validate/table_rows.h"

#include <fmt/format.h>

#include "core/check.h"

namespace shardbook::validate {

HybridJob job_of(const Row& row, int vocabulary, const char* seq) {
  HybridJob job;
  job.sizes.vocabulary =
      vocabulary > 0 ? vocabulary : row.count("vocab", kMaxSize);
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count(seq, kMaxSize);
  job.layers = row.count("layers", kMaxLayers);
  SB_CHECK(job.sizes.hidden % job.sizes.heads == 0, row.place(), ": hidden is ",
           job.sizes.hidden, ", which is no multiple of ", job.sizes.heads,
           " heads");
  return job;
}

void set_degrees(const Row& row, int tp, int pp, int cp, HybridJob& job) {
  const int gpus = row.count("gpus", kMaxSize);
  const std::int64_t together = std::int64_t{tp} * pp * cp;
  SB_CHECK(gpus % together == 0, row.place(), ": ", gpus,
           " GPUs do not divide by tp ", tp, " x pp ", pp, " x cp ", cp);
  job.layout.tp = tp;
  job.layout.cp = cp;
  job.pp = pp;
  job.dp = static_cast<int>(gpus / together);
  if (row.has("dp")) {
    SB_CHECK(row.count("dp") == job.dp, row.place(), ": dp is ",
             row.count("dp"), ", and ", gpus, " GPUs leave ", job.dp);
  }
}

int degree(const Row& row, const char* column) {
  if (!row.has(column)) return 1;
  const std::string& text = row.text(column);
  return text == "NA" || text == "n/a" ? 1 : row.count(column, 1 << 16);
}

void set_mesh(const Row& row, HybridJob& job, const char* chunks,
              const char* micro_batch) {
  set_degrees(row, degree(row, "tp"), degree(row, "pp"), degree(row, "cp"),
              job);
  job.layout.micro_batch = row.count(micro_batch, kMaxSize);
  job.chunks = degree(row, chunks);
}

void set_micro_batches(const Row& row, HybridJob& job) {
  const std::int64_t batch = row.count("global_batch");
  const std::int64_t together = job.dp * job.layout.micro_batch;
  SB_CHECK(batch % together == 0, row.place(), ": global_batch is ", batch,
           ", which is no multiple of ", job.dp, " replicas times ",
           job.layout.micro_batch, " sequences");
  job.micro_batches = batch / together;
  SB_CHECK(job.micro_batches <= kMaxMicroBatchesPerRank, row.place(),
           ": global_batch is ", batch, ", which makes ", job.micro_batches,
           " micro-batches; give at most ", kMaxMicroBatchesPerRank);
}

HybridJob megatron_job(const Row& row, const char* cluster, int vocabulary,
                       const char* seq) {
  HybridJob job = job_of(row, vocabulary, seq);
  job.cluster = cluster_named(cluster);
  job.layout.dtype = job.gradient_dtype = DType::kF16;
  job.layout.dropout = kMegatronDropout;
  job.layout.recompute = Recompute::kBlocks;
  return job;
}

HybridJob sc21_table1_job(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row);
  set_mesh(row, job, "virtual_stages_v");
  set_micro_batches(row, job);
  return job;
}

void expect_selene(const Row& row) {
  require(row.says("hardware", "A100-80GB"),
          "no cluster describes " + row.text("hardware"));
}

std::string describe(const std::string& model, const HybridJob& job) {
  return fmt::format(
      "{}{}tp {} pp {} dp {}{}, {} x {}", model, model.empty() ? "" : ", ",
      job.layout.tp, job.pp, job.dp,
      job.layout.cp > 1 ? fmt::format(" cp {}", job.layout.cp) : "",
      job.micro_batches, job.layout.micro_batch);
}

std::string describe_on_gpus(const std::string& model, const HybridJob& job) {
  return fmt::format("{}, sequence {}, {} x {} on {} GPUs", model,
                     job.sizes.seq, job.micro_batches, job.layout.micro_batch,
                     job.ranks());
}

Outcome rate_outcome(const std::string& name, const HybridJob& job,
                     const StepTime& time, const char* unit, double work,
                     double published) {
  return {name,
          unit,
          {work / job.ranks() / time.seconds, published},
          sim::trust_name(time.trust)};
}

Outcome tflops_outcome(const std::string& model, const HybridJob& job,
                       const Row& row) {
  return rate_outcome(describe(model, job), job, hybrid_step(job),
                      "TFLOP/s per GPU", recomputed_flops(job) / 1e12,
                      row.positive("tflops_per_gpu"));
}

Outcome time_outcome(const std::string& name, const HybridJob& job,
                     const StepTime& time, const char* unit, double per_second,
                     double published, double flops) {
  return {name,
          unit,
          {time.seconds * per_second, published, flops / job.ranks()},
          sim::trust_name(time.trust)};
}

}  // namespace shardbook::validate
