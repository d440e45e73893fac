// Long sequences that are cut over a group: ring attention alone, and training
// with Ulysses and its rivals.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <regex>

#include "bench/validate/clusters.h"
#include "bench/validate/job_rows.h"
#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"
#include "bench/validate/pieces.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

using sequence_parallel::Layout;

// --- zhuzilin/ring-flash-attention -------------------------------------------

sim::Cluster ring_cluster(const std::string& gpu) {
  if (gpu == "A100") return cluster_named("ring-a100");
  if (gpu == "H800") return cluster_named("ring-h800");
  throw NotExpressed("no cluster has " + gpu);
}

void read_heads(const Row& row, AttentionJob& job) {
  static const std::regex pattern(
      R"(.*\((\d{1,4}) q heads, (\d{1,4}) kv heads, d=(\d{1,4})\))");
  const std::string& shape = row.text("shape");
  std::smatch found;
  SB_CHECK(std::regex_match(shape, found, pattern), row.place(),
           ": shape is \"", shape,
           "\"; it ends in (Q q heads, K kv heads, d=WIDTH)");
  job.heads = std::stoll(found[1].str());
  job.kv_heads = std::stoll(found[2].str());
  job.head_dim = std::stoll(found[3].str());
  SB_CHECK(job.kv_heads > 0 && job.head_dim > 0 && job.heads > 0 &&
               job.heads % job.kv_heads == 0,
           row.place(), ": shape is \"", shape,
           "\"; q heads are a multiple of kv heads, and all are above 0");
}

// Iterations per second of one attention, whose sequence is cut over 8 GPUs.
std::vector<Outcome> ring_flash_attention(const Row& row) {
  if (row.text("api") != "batch") {
    throw NotExpressed("several sequences packed into one have no chapter");
  }
  static const std::map<std::string, Layout> layouts = {
      {"ring", Layout::kContiguous},
      {"zigzag", Layout::kZigzag},
      {"stripe", Layout::kStriped}};
  const std::string& variant = row.text("variant");
  const bool is_bound = variant.rfind("theoretic (1-GPU", 0) == 0;
  const auto layout = layouts.find(variant);
  if (!is_bound && layout == layouts.end()) {
    throw NotExpressed("variant " + variant + " has no chapter");
  }
  AttentionJob job;
  job.cluster = ring_cluster(row.text("gpu"));
  job.tokens_per_rank = row.count("tokens_per_gpu", kMaxSize);
  read_heads(row, job);
  const int world = row.count("world", 1024);
  job.ranks = is_bound ? 1 : world;
  if (!is_bound) job.layout = layout->second;
  const std::string& phase = row.text("phase");
  job.with_backward = phase == "fwd+bwd";
  const AttentionRun run = run_attention(job);

  Outcome outcome;
  outcome.row = fmt::format("{}, {}, {}", row.text("gpu"), phase,
                            is_bound ? "one GPU's rate / world" : variant);
  outcome.unit = "iterations/s";
  outcome.pair.predicted = 1 / run.seconds / (is_bound ? world : 1);
  outcome.pair.published = row.positive("iter_per_s");
  // One constant: a rate per product; two forward, five backward
  outcome.pair.null_scale = job.with_backward ? 1 / 7.0 : 1 / 2.0;
  outcome.pair.contest = row.text("gpu") + " " + phase;
  outcome.trust = sim::trust_name(run.trust);
  return {outcome};
}

// --- DeepSpeed's charts ------------------------------------------------------

// The charts print neither sizes nor batch. Sizes are those of the models that
// are known under these numbers of parameters, with heads for all GPUs to
// share: GPT-3 6.7B; OPT-30B with 64 heads in place of 56.
void set_sizes(const std::string& name, ModelConfig& model) {
  model.vocab_size = 51200;
  if (name == "GPT 7B") {
    model.n_layer = 32, model.n_embd = 4096, model.n_head = 32;
  } else if (name == "GPT 30B") {
    model.n_layer = 48, model.n_embd = 7168, model.n_head = 64;
  } else {
    throw NotExpressed(name +
                       " ran on one system alone: it has no order to predict");
  }
}

// Tokens of a step in all rows: the same work for every system.
constexpr std::int64_t kTokensPerStep = 1 << 20;

Strategy strategy_of(const std::string& system) {
  static const std::map<std::string, Strategy> strategies = {
      {"Ulysses (a2a SP)", Strategy::kUlysses},
      {"Megatron-LM", Strategy::kMegatron},
      {"ColossalAI-SP (ring RSA)", Strategy::kRsa}};
  const auto found = strategies.find(system);
  if (found == strategies.end()) {
    throw NotExpressed("system " + system + " has no chapter");
  }
  return found->second;
}

std::vector<Outcome> ulysses_charts(const Row& row) {
  Job job;
  job.strategy = strategy_of(row.text("system"));
  set_sizes(row.text("model"), job.model);
  if (row.text("outcome") != "ran") {
    throw NotExpressed("it ran out of memory: no rate was printed");
  }
  if (row.text("hardware") != "A100-40GB") {
    throw NotExpressed("no cluster describes " + row.text("hardware"));
  }
  job.cluster = "a100-40gb-cloud";
  job.ranks = row.count("gpus", kMaxSize);
  job.seq = row.count("seq_len", kMaxSize);
  job.model.n_positions = job.seq;
  job.micro_batch = std::max<std::int64_t>(1, kTokensPerStep / job.seq);
  const StepTime time = step_time(job);

  Outcome outcome;
  outcome.row = describe(
      fmt::format("{}, {}", row.text("system"), row.text("model")), job);
  outcome.unit = "TFLOP/s per GPU";
  // Three quarters: nothing is recomputed
  outcome.pair.predicted =
      0.75 * megatron_flops(job) / job.ranks / time.seconds / 1e12;
  outcome.pair.published = row.positive("tflops_per_gpu");
  outcome.pair.contest =
      fmt::format("{}, {} GPUs, sequence {}", row.text("model"),
                  row.text("gpus"), row.text("seq_len"));
  outcome.trust = sim::trust_name(time.trust);
  return {outcome};
}

}  // namespace

std::vector<Kind> sequence_kinds() {
  return {
      {"ring_flash_attention",
       {"api", "gpu", "phase", "world", "tokens_per_gpu", "shape", "variant",
        "iter_per_s"},
       false,
       order_aim(1, "the order of the variants: Spearman 1"),
       ring_flash_attention,
       ""},
      {"ulysses_charts",
       {"model", "gpus", "system", "seq_len", "tflops_per_gpu", "outcome",
        "hardware"},
       false,
       order_aim(1, "the order of the systems: Spearman 1"),
       ulysses_charts,
       "the charts print neither sizes nor batch: GPT-3's 6.7B, OPT's 30B with "
       "64 heads, and a million tokens per step, over all GPUs; weights are "
       "whole (Ulysses) or cut (Megatron-LM), where the authors used ZeRO-3"}};
}

}  // namespace shardbook::validate
