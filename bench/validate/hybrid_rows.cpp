#include "bench/validate/hybrid_rows.h"

#include <fmt/format.h>

#include "bench/validate/clusters.h"
#include "bench/validate/job_rows.h"
#include "core/check.h"

namespace shardbook::validate {

HybridJob hybrid_job_of(const Row& row, int vocabulary) {
  HybridJob job;
  job.sizes.vocabulary = vocabulary;
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count("seq_len", kMaxSize);
  job.layers = row.count("layers", kMaxLayers);
  SB_CHECK(job.sizes.hidden % job.sizes.heads == 0, row.place(), ": hidden is ",
           job.sizes.hidden, ", which is no multiple of ", job.sizes.heads,
           " heads");
  return job;
}

void set_degrees(const Row& row, int tp, int pp, int cp, HybridJob& job) {
  const int gpus = row.count("gpus", kMaxSize), together = tp * pp * cp;
  SB_CHECK(gpus % together == 0, row.place(), ": ", gpus,
           " GPUs do not divide by tp ", tp, " x pp ", pp, " x cp ", cp);
  job.layout.tp = tp;
  job.layout.cp = cp;
  job.pp = pp;
  job.dp = gpus / together;
  if (row.has("dp")) {
    SB_CHECK(row.count("dp") == job.dp, row.place(), ": dp is ",
             row.count("dp"), ", and ", gpus, " GPUs leave ", job.dp);
  }
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

int ranks_of(const HybridJob& job) {
  return job.layout.tp * job.layout.cp * job.pp * job.dp;
}

HybridJob megatron_job(const Row& row) {
  HybridJob job = hybrid_job_of(row, row.count("vocab", kMaxSize));
  job.cluster = cluster_named("selene");
  job.layout.dtype = job.gradient_dtype = DType::kF16;
  job.layout.dropout = kMegatronDropout;
  job.layout.recompute = Recompute::kBlocks;
  return job;
}

HybridJob sc21_table1_job(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row);
  set_degrees(row, row.count("tp"), row.count("pp"), 1, job);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  job.chunks = row.count("virtual_stages_v");
  set_micro_batches(row, job);
  return job;
}

std::string describe(const std::string& model, const HybridJob& job) {
  return fmt::format(
      "{}{}tp {} pp {} dp {}{}, {} x {}", model, model.empty() ? "" : ", ",
      job.layout.tp, job.pp, job.dp,
      job.layout.cp > 1 ? fmt::format(" cp {}", job.layout.cp) : "",
      job.micro_batches, job.layout.micro_batch);
}

}  // namespace shardbook::validate
