// Tensor parallelism, with and without cut tokens: training steps, and one
// layer.

#include <fmt/format.h>

#include "bench/validate/clusters.h"
#include "bench/validate/hybrid_rows.h"
#include "bench/validate/job_rows.h"
#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"
#include "bench/validate/pieces.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

Outcome step_outcome(const std::string& model, const Job& job,
                     const std::string& unit, double per_second,
                     double published) {
  const StepTime time = step_time(job);
  Outcome outcome;
  outcome.row = describe(model, job);
  outcome.unit = unit;
  outcome.pair.predicted = time.seconds * per_second;
  outcome.pair.published = published;
  // One constant: a time per unit of work
  outcome.pair.null_scale = megatron_flops(job) / job.ranks;
  outcome.trust = sim::trust_name(time.trust);
  return outcome;
}

// Megatron-LM of 2020, weak scaling.
std::vector<Outcome> megatron_2020(const Row& row) {
  const std::string& hardware = row.text("hardware");
  Job job = job_of(row, row.count("vocab", kMaxSize));
  if (hardware == "DGX-A100") {
    job.cluster = "selene";  // DGX A100 with Megatron-LM's software
  } else if (hardware.find("V100") != std::string::npos) {
    job.cluster = "dgx2-v100";
  } else {
    throw NotExpressed("no cluster describes " + hardware);
  }
  const int dp = row.count("dp"), tp = row.count("tp", kMaxSize);
  SB_CHECK(static_cast<std::int64_t>(dp) * tp == job.ranks, row.place(),
           ": dp is ", dp, " and tp ", tp, " on ", job.ranks, " GPUs");
  if (dp > 1 && tp > 1) {
    throw NotExpressed("no chapter joins tensor and data parallelism yet");
  }
  job.strategy = dp > 1   ? Strategy::kDdp
                 : tp > 1 ? Strategy::kTensor
                          : Strategy::kOneDevice;
  const std::int64_t batch = row.count("global_batch");
  SB_CHECK(batch % dp == 0, row.place(), ": global_batch is ", batch,
           ", which does not divide by dp ", dp);
  job.micro_batch = batch / dp;
  job.dtype = DType::kF16;
  job.dropout = kMegatronDropout;
  job.recompute = row.text("activation_recompute").rfind("full", 0) == 0;
  return {step_outcome(row.text("case") + " " + hardware, job, "ms", 1e3,
                       row.positive("iter_time_ms"))};
}

/// The layer of an experiment of table 4.
LayerJob layer_of(const Row& row) {
  if (row.text("unit") != "one transformer layer") {
    throw NotExpressed("unit " + row.text("unit") + " is not one layer");
  }
  LayerJob job;
  job.cluster = cluster_named("selene-2022");
  job.ranks = row.count("tp", kMaxSize);
  job.hidden = row.count("hidden", 1 << 17);
  job.heads = row.count("heads", 1 << 12);
  job.seq = row.count("seq_len", kMaxSize);
  job.micro_batch = row.count("micro_batch", kMaxSize);
  job.dropout = kMegatronDropout;
  const std::string& experiment = row.text("experiment");
  if (experiment == "sequence parallelism") {
    job.cuts_tokens = true;
  } else if (experiment == "selective + sequence") {
    job.cuts_tokens = job.recompute_attention = true;
  } else if (experiment == "baseline with full recompute") {
    job.recompute = true;
  } else if (experiment == "selective recompute") {
    throw NotExpressed(
        "no chapter recomputes attention alone while all ranks have all "
        "tokens");
  } else if (experiment != "baseline no recompute") {
    throw NotExpressed("experiment " + experiment + " has no chapter");
  }
  return job;
}

// Korthikanti et al. 2022, table 4.
std::vector<Outcome> korthikanti_layer(const Row& row) {
  expect_selene(row);
  const LayerJob job = layer_of(row);
  const LayerRun run = run_layer(job);
  const auto outcome = [&](const char* part, const char* column, double seconds,
                           double work) {
    Outcome result;
    result.row = fmt::format("{}, {}, {}", row.text("model"),
                             row.text("experiment"), part);
    result.unit = "ms";
    result.pair.predicted = seconds * 1e3;
    result.pair.published = row.positive(column);
    result.pair.null_scale = work;
    result.trust = sim::trust_name(run.trust);
    return result;
  };
  // Work in forwards: a backward is two, and recomputation one more
  return {outcome("forward", "forward_ms", run.forward_s, 1),
          outcome("backward", "backward_ms", run.backward_s,
                  job.recompute ? 3 : 2)};
}

}  // namespace

std::vector<Kind> tensor_kinds() {
  return {
      {"megatron_2020_tp_weak_scaling",
       {"case", "hidden", "heads", "layers", "tp", "dp", "gpus", "global_batch",
        "seq_len", "vocab", "hardware", "iter_time_ms", "activation_recompute"},
       true,
       mean_aim(0.10, "MAPE within 10 %"),
       megatron_2020,
       ""},
      {"korthikanti_table4_layer",
       {"model", "hidden", "heads", "seq_len", "micro_batch", "tp", "unit",
        "experiment", "forward_ms", "backward_ms", "hardware"},
       true,
       mean_aim(0.08, "MAPE within 8 %"),
       korthikanti_layer,
       "one constant was fitted to this table: the speed of the software of "
       "2022 (selene-2022)"}};
}

}  // namespace shardbook::validate
