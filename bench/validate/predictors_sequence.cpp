// Sequences that are cut over a group: a layer alone, ring attention alone, and
// training with Ulysses and its rivals.

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "bench/validate/jobs.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

using sequence_parallel::Layout;

// --- zhuzilin/ring-flash-attention -------------------------------------------

void read_heads(const Row& row, AttentionJob& job) {
  const std::vector<double> found =
      numbers_in(row, "shape",
                 R"(.*\((\d{1,4}) q heads, (\d{1,4}) kv heads, d=(\d{1,4})\))");
  if (!found.empty()) {
    job.heads = static_cast<std::int64_t>(found[0]);
    job.kv_heads = static_cast<std::int64_t>(found[1]);
    job.head_dim = static_cast<std::int64_t>(found[2]);
  }
  SB_CHECK(job.kv_heads > 0 && job.head_dim > 0 && job.heads > 0 &&
               job.heads % job.kv_heads == 0,
           row.place(), ": shape is \"", row.text("shape"),
           "\"; it ends in (Q q heads, K kv heads, d=WIDTH); q heads are a "
           "multiple of kv heads, and all are above 0");
}

// --- DeepSpeed's charts ------------------------------------------------------

// The charts print neither sizes nor batch. Sizes are those of the models that
// are known under these numbers of parameters, with heads for all GPUs to
// share: GPT-3 6.7B; OPT-30B with 64 heads in place of 56.
void set_sizes(const std::string& name, HybridJob& job) {
  job.sizes.vocabulary = 51200;
  if (name == "GPT 7B") {
    job.layers = 32, job.sizes.hidden = 4096, job.sizes.heads = 32;
  } else if (name == "GPT 30B") {
    job.layers = 48, job.sizes.hidden = 7168, job.sizes.heads = 64;
  } else {
    throw NotExpressed(name +
                       " ran on one system alone: it has no order to predict");
  }
}

// Tokens of a step in all rows: the same work for every system.
constexpr std::int64_t kTokensPerStep = 1 << 20;

}  // namespace

// Iterations per second of one attention, whose sequence is cut over 8 GPUs.
std::vector<Outcome> ring_flash_attention(const Row& row) {
  require(row.text("api") == "batch",
          "several sequences packed into one have no chapter");
  const bool is_bound = row.begins("variant", "theoretic (1-GPU");
  AttentionJob job;
  job.cluster = cluster_named(choice<std::string>(
      row, "gpu", {{"A100", "ring-a100"}, {"H800", "ring-h800"}}));
  job.tokens_per_rank = row.count("tokens_per_gpu", kMaxSize);
  read_heads(row, job);
  const int world = row.count("world", 1024);
  job.ranks = is_bound ? 1 : world;
  if (!is_bound) {
    job.layout = choice<Layout>(row, "variant",
                                {{"ring", Layout::kContiguous},
                                 {"zigzag", Layout::kZigzag},
                                 {"stripe", Layout::kStriped}});
  }
  const std::string& phase = row.text("phase");
  job.with_backward = phase == "fwd+bwd";
  const StepTime time = run_attention(job);
  // One constant: a rate per product; two forward, five backward
  return {
      {fmt::format("{}, {}, {}", row.text("gpu"), phase,
                   is_bound ? "one GPU's rate / world" : row.text("variant")),
       "iterations/s",
       {1 / time.seconds / (is_bound ? world : 1), row.positive("iter_per_s"),
        job.with_backward ? 1 / 7.0 : 1 / 2.0, row.text("gpu") + " " + phase},
       sim::trust_name(time.trust)}};
}

// Korthikanti et al. 2022, table 4: a layer alone.
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
  std::tie(job.layout.cuts_tokens, job.layout.recompute) =
      choice<std::pair<bool, Recompute>>(
          row, "experiment",
          {{"baseline no recompute", {false, Recompute::kNothing}},
           {"baseline with full recompute", {false, Recompute::kBlocks}},
           {"sequence parallelism", {true, Recompute::kNothing}},
           {"selective + sequence", {true, Recompute::kAttention}}});
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

std::vector<Outcome> ulysses_charts(const Row& row) {
  const std::string& system = row.text("system");
  const bool is_megatron = system == "Megatron-LM";
  const bool is_ulysses = system == "Ulysses (a2a SP)";
  require(is_megatron || is_ulysses || system == "ColossalAI-SP (ring RSA)",
          "system " + system + " has no chapter");
  HybridJob job;
  set_sizes(row.text("model"), job);
  require(row.text("outcome") == "ran",
          "it ran out of memory: no rate was printed");
  require(row.text("hardware") == "A100-40GB",
          "no cluster describes " + row.text("hardware"));
  job.cluster = cluster_named("a100-40gb-cloud");
  (is_megatron ? job.layout.tp : job.layout.cp) = row.count("gpus", kMaxSize);
  job.sizes.seq = row.count("seq_len", kMaxSize);
  job.layout.micro_batch =
      std::max<std::int64_t>(1, kTokensPerStep / job.sizes.seq);
  job.layout.dtype = DType::kBF16;
  using sequence_parallel::Kind;
  const StepTime time =
      is_megatron
          ? with_megatron(job)
          : with_sequence(job, is_ulysses ? Kind::kUlysses : Kind::kRsa);
  // Nothing is recomputed: three quarters of the work
  const double work = 0.75 * recomputed_flops(job) / 1e12 / job.ranks();
  return {{fmt::format("{}, {}, sequence {}, {} x {} on {} GPUs", system,
                       row.text("model"), job.sizes.seq, job.micro_batches,
                       job.layout.micro_batch, job.ranks()),
           "TFLOP/s per GPU",
           {work / time.seconds, row.positive("tflops_per_gpu"), 1,
            fmt::format("{}, {} GPUs, sequence {}", row.text("model"),
                        row.text("gpus"), row.text("seq_len"))},
           sim::trust_name(time.trust)}};
}

}  // namespace shardbook::validate
