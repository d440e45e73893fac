// Training steps over a mesh: the rows that anybody can bring.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "bench/validate/jobs.h"
#include "chapters/common/models/counted_model.h"
#include "chapters/common/models/models.h"
#include "chapters/common/sharded/parts.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

/// 1 where nothing is given.
int degree(const Row& row, const char* column) {
  return row.has(column) ? row.count(column, 1 << 16) : 1;
}

/// "22B, tp 8 pp 1 dp 1, 1 x 4".
std::string describe(const std::string& model, const HybridJob& job) {
  return fmt::format(
      "{}, tp {} pp {} dp {}{}, {} x {}", model, job.layout.tp, job.pp, job.dp,
      job.layout.cp > 1 ? fmt::format(" cp {}", job.layout.cp) : "",
      job.micro_batches, job.layout.micro_batch);
}

/// What `read` returns; its Error is about this column.
template <typename Read>
auto of_column(const std::string& column, const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    const std::string text = error.what();
    throw NotExpressed(column + ": " + text.substr(0, text.find(';')));
  }
}

/// The sizes of a decoder whose blocks are alike. Every second one may have a
/// window.
void set_counted(const CountedModel& model, HybridJob& job) {
  const auto refuse = [&](const std::string& what) {
    throw NotExpressed("model " + model.type + ": " + what);
  };
  double blocks = 0, with_window = 0, weights = 0;
  DecoderSizes& sizes = job.sizes;
  sizes.is_llama = true;
  job.is_tied = false;
  for (const CountedPart& row : model.rows) {
    const BlockPart& part = row.part;
    job.is_tied = job.is_tied || row.is_tied;
    if (row.group == "embedding") sizes.vocabulary = part.in;
    if (row.group == "shared_experts") refuse("has experts for every token");
    if (part.kind == PartKind::kAttention) {
      if (row.latent > 0) refuse("has latent attention");
      blocks += row.times;
      if (part.window > 0) {
        with_window += row.times;
        sizes.window = part.window;
      }
      sizes.heads = part.heads;
      sizes.kv_heads = part.columns[1].parts;
      sizes.head_dim = part.columns[0].width / part.heads;
    }
    if (row.group == "experts" && part.kind == PartKind::kProduct) {
      sizes.experts = part.experts;
      sizes.experts_per_token = part.chosen;
    }
    const bool is_mlp = row.group == "mlp" || row.group == "experts";
    if (is_mlp && part.kind == PartKind::kProduct) {
      weights +=
          row.times * static_cast<double>(part.experts * part.in * part.out);
      sizes.hidden = part.out;  // of its last product
      sizes.mlp = part.in;
    }
    if (row.group == "norm" && part.heads > 1) sizes.normalizes_heads = true;
  }
  job.layers = static_cast<std::int64_t>(blocks);
  const auto experts =
      static_cast<double>(std::max<std::int64_t>(sizes.experts, 1));
  const double products =
      weights /
      (blocks * experts * static_cast<double>(sizes.hidden * sizes.mlp));
  sizes.is_gated = products == 3;
  if (products != 3 && products != 2) refuse("its blocks have different MLPs");
  if (with_window > 0 && 2 * with_window != blocks) {
    refuse("windows are not in every second block");
  }
}

/// A preset or a config.json, by itself or beside the table.
std::string model_of(const Row& row) {
  const std::string& name = row.text("model");
  const std::filesystem::path beside =
      std::filesystem::path(row.place()).parent_path() / name;
  return std::filesystem::exists(beside) ? beside.string() : name;
}

/// The model that the row names, or a GPT of its sizes.
HybridJob job_of_model(const Row& row) {
  if (row.has("hidden")) return gpt_job(row);
  HybridJob job;
  job.sizes.seq = row.count("seq", kMaxSize);
  const std::string name = model_of(row);
  const CountedModel model =
      of_column("model", [&] { return CountedModel::read(name); });
  set_counted(model, job);
  // The layers that train, where they know the number format and what is kept
  const bool trains = model.trained && model.trained->is_llama() &&
                      job.sizes.experts == 0 && job.sizes.window == 0 &&
                      row.text("dtype") != "fp8" &&
                      !(row.has("recompute") && row.says("recompute", "every"));
  if (trains) {
    job.sizes = {.hidden = job.sizes.hidden,
                 .heads = job.sizes.heads,
                 .seq = job.sizes.seq,
                 .vocabulary = job.sizes.vocabulary,
                 .model = std::make_shared<const ModelConfig>(*model.trained)};
  }
  if (row.has("layers")) job.layers = row.count("layers", kMaxLayers);
  return job;
}

/// Linear layers in FP8; attention, norms and messages in BF16.
void compute_in_fp8(HybridJob& job) {
  sim::DeviceSpec& device = job.cluster.device;
  require(device.fp8_speedup > 0,
          "dtype is fp8, which " + device.name + " has not");
  job.cluster.name += " in FP8";
  job.layout.converts_to_fp8 = true;
  device.peak_flops[DType::kBF16] *= device.fp8_speedup;
  device.max_attention_efficiency /= device.fp8_speedup;
}

void set_software(const Row& row, HybridJob& job) {
  const std::string& name = row.text("cluster");
  job.cluster = of_column("cluster or software", [&] {
    return cluster_named(row.has("software") ? name + "+" + row.text("software")
                                             : name);
  });
  const sim::Software& software = job.cluster.software;
  job.is_synchronous = software.is_synchronous;
  job.overlaps_gradients = software.overlaps_gradients;
  job.overlaps_tensor = software.overlaps_tensor;
  job.scatters_messages = software.scatters_messages;
  job.waits_for_messages = software.waits_for_messages;
  job.layout.sends_once_per_node = software.sends_once_per_node;
  if (!row.has("overlap")) return;
  const std::string& overlap = row.text("overlap");
  job.overlaps_gradients = overlap.find("gradients") != std::string::npos;
  job.overlaps_tensor = overlap.find("tensor") != std::string::npos;
  require(
      overlap == "none" || job.overlaps_gradients || job.overlaps_tensor,
      "overlap is \"" + overlap + "\"; none, gradients and tensor are known");
}

struct Unit {
  double per_second = 0;  ///< of a time; 0: a rate
  bool is_per_token = false, is_per_sample = false;
  bool recomputes = false;  ///< its operations count those done again
};

const std::map<std::string, Unit>& units() {
  static const std::map<std::string, Unit> all = {
      {"s", {.per_second = 1}},
      {"ms", {.per_second = 1e3}},
      {"tokens/s per device", {.is_per_token = true}},
      {"samples/s per device", {.is_per_sample = true}},
      {"TFLOP/s per device", {}},
      {"TFLOP/s per device, with those done again", {.recomputes = true}}};
  return all;
}

/// Of DeepSpeed, the ZeRO chapter's program: its host copies what a gather brings
/// while nothing else is issued.
StepTime time_of(const HybridJob& job) {
  const sim::Software& software = job.cluster.software;
  if (job.zero_stage < 3 || software.member_s == 0) return hybrid_step(job);
  require(job.replicas() == job.ranks(), "zero is 3, with tp or pp");
  return with_zero3(job, software.fetches_modules);
}

}  // namespace

HybridJob read_job(const Row& row) {
  HybridJob job = job_of_model(row);
  set_software(row, job);
  const auto devices = std::int64_t{row.count("devices", kMaxSize)};
  job.layout.tp = degree(row, "tp");
  job.layout.cp = degree(row, "cp");
  job.layout.ep = degree(row, "ep");
  job.pp = degree(row, "pp");
  job.chunks = degree(row, "vpp");
  const std::int64_t together =
      std::int64_t{job.layout.tp} * job.layout.cp * job.pp;
  SB_CHECK(devices % together == 0, row.place(), ": devices is ", devices,
           ", which is no multiple of tp ", job.layout.tp, " x cp ",
           job.layout.cp, " x pp ", job.pp);
  job.dp = static_cast<int>(devices / together);
  SB_CHECK(!row.has("dp") || row.count("dp") == job.dp, row.place(), ": dp is ",
           row.text("dp"), ", and ", devices, " devices leave ", job.dp);

  job.layout.micro_batch = degree(row, "micro_batch");
  const std::int64_t batch = row.count("batch");
  const std::int64_t each = job.dp * job.layout.micro_batch;
  require(batch % each == 0,
          fmt::format("batch is {}, which is no multiple of {} replicas x "
                      "micro_batch {}",
                      batch, job.dp, job.layout.micro_batch));
  job.micro_batches = batch / each;
  SB_CHECK(job.micro_batches <= kMaxMicroBatchesPerRank, row.place(),
           ": batch is ", batch, ", which makes ", job.micro_batches,
           " micro-batches; give at most ", kMaxMicroBatchesPerRank * each);

  const bool is_fp8 = row.text("dtype") == "fp8";
  job.layout.dtype = choice<DType>(row, "dtype",
                                   {{"f32", DType::kF32},
                                    {"f16", DType::kF16},
                                    {"bf16", DType::kBF16},
                                    {"fp8", DType::kBF16}},
                                   DType::kBF16);
  if (is_fp8) compute_in_fp8(job);
  const sim::Software& software = job.cluster.software;
  job.layout.scales_by_maximum = is_fp8 && software.scales_by_maximum;
  job.gradient_dtype = software.sums_in_f32 ? DType::kF32 : job.layout.dtype;
  job.layout.dropout = row.has("dropout") ? row.number("dropout") : 0;
  job.layout.cuts_tokens = is_set(row, "sp") && job.layout.tp > 1;
  job.layout.recompute = choice<Recompute>(
      row, "recompute",
      {{"never", Recompute::kNothing},
       {"attention", Recompute::kAttention},
       {"blocks", Recompute::kBlocks},
       {"every second block", Recompute::kEverySecondBlock},
       {"every second product", Recompute::kEverySecondProduct}},
      Recompute::kNothing);
  job.zero_stage =
      choice<int>(row, "zero", {{"0", 0}, {"1", 1}, {"2", 2}, {"3", 3}}, 0);
  // The schedules that keep as many sets of activations as 1F1B, and twice as many
  const int sets = choice<int>(row, "schedule",
                               {{"1f1b", -1},
                                {"interleaved", -1},
                                {"zb-h1", 0},
                                {"zb-1p", job.pp},
                                {"zb-2p", 2 * job.pp}},
                               -1);
  job.is_zero_bubble = sets >= 0;
  job.zero_bubble_sets = std::max(sets, 0);
  require(job.zero_stage <= 1 || job.pp == 1,
          fmt::format("zero is {}, with pp {}", job.zero_stage, job.pp));
  // Megatron-LM pads the tokens' table
  job.sizes.vocabulary = padded_vocabulary(job.sizes.vocabulary, job.layout.tp);
  const std::int64_t stages = std::int64_t{job.pp} * job.chunks;
  // Embedding and head may be stages without a block
  require(stages <= job.layers + 2,
          fmt::format("pp {} x vpp {} are more stages than {} blocks", job.pp,
                      job.chunks, job.layers));
  job.blocks = planner::balanced_blocks(job.layers, static_cast<int>(stages));
  return job;
}

std::vector<Outcome> job(const Row& row) {
  const HybridJob job = read_job(row);
  const Unit unit = choice<Unit>(row, "unit", units(), Unit{});
  const StepTime time = time_of(job);
  const bool recomputes =
      unit.recomputes ||
      (unit.per_second > 0 && job.layout.recompute == Recompute::kBlocks);
  const double flops =
      (recomputes ? recomputed_flops(job) : model_flops(job)) / job.ranks();
  Outcome outcome;
  outcome.row =
      describe(row.has("row") ? row.text("row") : row.text("model"), job);
  outcome.unit = row.text("unit");
  outcome.trust = sim::trust_name(time.trust);
  Pair& pair = outcome.pair;
  pair.published = row.positive("measured");
  if (unit.per_second > 0) {
    pair.predicted = time.seconds * unit.per_second;
    pair.null_scale = flops;
    outcome.lower_is_better = true;
  } else {
    const double work =
        unit.is_per_token ? job.tokens() / job.ranks()
        : unit.is_per_sample
            ? job.tokens() / job.ranks() / static_cast<double>(job.sizes.seq)
            : flops / 1e12;
    pair.predicted = work / time.seconds;
    pair.null_scale = work / flops;
  }
  if (row.has("contest")) pair.contest = row.text("contest");
  outcome.is_aimed_at = !row.has("apart");
  return {outcome};
}

}  // namespace shardbook::validate
