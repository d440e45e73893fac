// Training steps on H100: NeMo, torchtitan, Llama 3.

#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/validate/table_rows.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

DecoderSizes llama(std::int64_t hidden, std::int64_t heads,
                   std::int64_t kv_heads, std::int64_t mlp,
                   std::int64_t vocabulary) {
  return {.hidden = hidden,
          .heads = heads,
          .vocabulary = vocabulary,
          .kv_heads = kv_heads,
          .mlp = mlp,
          .is_llama = true};
}

/// The same with 128 experts in every layer, and heads of their own width.
DecoderSizes mixture(DecoderSizes sizes, std::int64_t head_dim,
                     std::int64_t experts_per_token) {
  sizes.head_dim = head_dim;
  sizes.experts = 128;
  sizes.experts_per_token = experts_per_token;
  return sizes;
}

/// Qwen3's, which normalises queries and keys.
DecoderSizes qwen3(std::int64_t hidden, std::int64_t heads, std::int64_t mlp) {
  DecoderSizes sizes = mixture(llama(hidden, heads, 4, mlp, 151936), 128, 8);
  sizes.normalizes_heads = true;
  return sizes;
}

/// Every second layer's attention sees 128 tokens.
DecoderSizes gpt_oss() {
  DecoderSizes sizes = mixture(llama(2880, 64, 8, 2880, 201088), 64, 4);
  sizes.window = 128;
  return sizes;
}

/// Squared ReLU in place of a gate.
DecoderSizes nemotron4() {
  DecoderSizes sizes = llama(6144, 48, 8, 24576, 256000);
  sizes.is_gated = false;
  return sizes;
}

/// Sizes that tables give only by a model's name.
struct Model {
  std::vector<std::string> names;  ///< prefixes of the row's name
  std::int64_t layers;
  DecoderSizes sizes;
};

const Model& model_of(const std::string& name) {
  static const std::vector<Model> models = {
      {{"Llama 3.1 8b", "Llama3.1-8B", "Llama3-8B", "LLAMA3_8B"},
       32,
       llama(4096, 32, 8, 14336, 128256)},
      {{"Llama 3.1 70b", "LLAMA3_70B"}, 80, llama(8192, 64, 8, 28672, 128256)},
      {{"Llama 3.1 405b", "Llama 3.1 405B", "LLAMA3.1_405B"},
       126,
       llama(16384, 128, 8, 53248, 128256)},
      {{"LLAMA2-7B"}, 32, llama(4096, 32, 32, 11008, 32000)},
      {{"Qwen3_30B_a3B"}, 48, qwen3(2048, 32, 768)},
      {{"Qwen3_235B_a22B"}, 94, qwen3(4096, 64, 1536)},
      {{"GPT OSS 120B"}, 36, gpt_oss()},
      {{"Nemotron4 15b"}, 32, nemotron4()}};
  for (const Model& model : models) {
    for (const std::string& begin : model.names) {
      if (name.rfind(begin, 0) == 0) return model;
    }
  }
  throw NotExpressed(name + " has no chapter yet");
}

/// Linear layers in FP8; attention, norms and messages in BF16.
void compute_in_fp8(HybridJob& job) {
  sim::DeviceSpec& device = job.cluster.device;
  require(device.fp8_speedup > 0, "no FP8 is known of " + device.name);
  job.cluster.name += " in FP8";
  job.layout.converts_to_fp8 = true;
  device.peak_flops[DType::kBF16] *= device.fp8_speedup;
  device.max_attention_efficiency /= device.fp8_speedup;
}

/// Megatron Core of 2024 and later, as NeMo sets it up.
HybridJob nemo_job(const std::string& model_name, const std::string& precision,
                   std::int64_t seq, const char* cluster = "dgx-h100") {
  const Model& model = model_of(model_name);
  HybridJob job;
  job.cluster = cluster_named(cluster);
  job.sizes = model.sizes;
  job.sizes.seq = seq;
  job.layers = model.layers;
  job.is_tied = false;
  job.layout.dtype = job.gradient_dtype = DType::kBF16;
  job.is_synchronous = false;
  job.zero_stage = 1;
  job.overlaps_gradients = true;
  job.overlaps_tensor = true;
  const bool is_fp8 = precision.rfind("FP8", 0) == 0;
  require(is_fp8 || precision.rfind("BF16", 0) == 0,
          "precision " + precision + " is not in the devices");
  if (is_fp8) compute_in_fp8(job);
  return job;
}

/// A row of NeMo, with its micro-batches; tp cuts tokens.
HybridJob nemo_job(const Row& row) {
  HybridJob job = nemo_job(row.text("model"), row.text("precision"),
                           row.count("seq_len", kMaxSize));
  set_mesh(row, job, "vp");
  set_micro_batches(row, job);
  job.layout.cuts_tokens = job.layout.tp > 1;
  return job;
}

/// The rate of a step over the mesh, which does `work`.
Outcome step_rate(const std::string& model, const HybridJob& job,
                  const char* unit, double work, double published) {
  Outcome outcome = rate_outcome(describe(model, job), job, hybrid_step(job),
                                 unit, work, published);
  // One share of the peak for all rows
  outcome.pair.null_scale = work / model_flops(job);
  return outcome;
}

}  // namespace

// NVIDIA/dgxc-benchmarking.
std::vector<Outcome> dgxc(const Row& row) {
  require(row.text("gpu") == "H100", "no cluster has " + row.text("gpu"));
  HybridJob job = nemo_job(row);
  job.layers = row.count("layers", kMaxLayers);
  return {time_outcome(
      describe(row.text("model") + " " + row.text("gpus"), job), job,
      hybrid_step(job), "s", 1, row.positive("step_time_s"), model_flops(job))};
}

// NVIDIA-NeMo/Megatron-Bridge.
std::vector<Outcome> nemo(const Row& row) {
  require(row.text("system") == "DGX-H100",
          "no cluster describes " + row.text("system"));
  require(row.text("task") == "Pre-Training Performance",
          "fine-tuning has no chapter");
  HybridJob job = nemo_job(row);
  job.layout.ep = degree(row, "ep");
  // Megatron Core drops tokens with its plain all-to-all only, which sends a
  // copy to each expert (megatron/bridge/utils, apply_moe_token_drop)
  job.layout.sends_once_per_node = !row.says("model", "tokendrop");
  // Their settings are FP8_CS: current scaling
  job.layout.scales_by_maximum = job.layout.converts_to_fp8;
  return {step_rate(row.text("model") + " " + row.text("release"), job,
                    "tokens/s per GPU", job.tokens(),
                    row.positive("tokens_per_s_per_gpu"))};
}

// NVIDIA/NeMo, Llama 2 with sequences of 4 to 1024 thousand tokens.
std::vector<Outcome> nemo_long(const Row& row) {
  HybridJob job = nemo_job(row.text("model"), "FP8",
                           std::int64_t{1024} * row.count("seq_len_K", 4096));
  job.layout.tp = row.count("tp", 1024);
  job.pp = row.count("pp", 1024);
  job.dp = row.count("dp", 1024);
  job.layout.cp = row.count("cp", 1024);
  job.layout.cuts_tokens = job.layout.tp > 1;
  const int batch = row.count("global_batch");
  SB_CHECK(batch % job.dp == 0, row.place(), ": global_batch is ", batch,
           ", which does not divide by dp ", job.dp);
  job.micro_batches = batch / job.dp;
  return {step_rate(fmt::format("LLAMA2-7B, {}K", row.text("seq_len_K")), job,
                    "TFLOP/s per GPU", model_flops(job) / 1e12,
                    row.positive("cp_tflops_per_gpu"))};
}

// Dubey et al. 2024, table 4. Sequences one by one. Each layer is a stage: the
// first stage has the embedding alone, the last one the head (section 3.3.2).
std::vector<Outcome> llama3(const Row& row) {
  const HybridJob job = llama3_job(row);
  return {step_rate(row.text("model"), job, "TFLOP/s per GPU",
                    model_flops(job) / 1e12, row.positive("tflops_per_gpu"))};
}

// pytorch/torchtitan, benchmarks. FSDP gathers parameters in 16 bits, twice,
// and sums gradients in f32; without torch.compile, norms, rotary positions
// and activations are many operations.
std::vector<Outcome> torchtitan(const Row& row) {
  require(row.says("hardware", "H100-96GB"),
          "no cluster describes " + row.text("hardware"));
  require(row.says("technique", "compile") || row.says("technique", " TP "),
          "without torch.compile, operations are not fused");
  require(!row.says("technique", "rowwise"),
          "FP8 with a scale per row is not in the devices");
  HybridJob job =
      nemo_job(row.text("model"), row.says("technique", "fp8") ? "FP8" : "BF16",
               row.count("seq_len", kMaxSize), "grand-teton-h100-500w");
  set_mesh(row, job, "", "local_batch");
  SB_CHECK(job.dp == row.count("fsdp"), row.place(), ": fsdp is ",
           row.text("fsdp"), ", and ", row.text("gpus"), " GPUs leave ",
           job.dp);
  job.zero_stage = 3;
  job.gradient_dtype = DType::kF32;
  job.overlaps_tensor = row.says("technique", "async");
  job.layout.cuts_tokens = job.layout.tp > 1;
  job.layout.scales_by_maximum = job.layout.converts_to_fp8;
  job.layout.recompute = row.text("ac") == "full"
                             ? Recompute::kBlocks
                             : Recompute::kEverySecondProduct;
  return {step_rate(row.text("technique") + " " + row.text("seq_len"), job,
                    "tokens/s per GPU", job.tokens(),
                    row.positive("tokens_per_s_per_gpu"))};
}

HybridJob llama3_job(const Row& row) {
  HybridJob job = nemo_job(row.text("model"), "BF16",
                           row.count("seq_len", kMaxSize), "grand-teton-h100");
  job.overlaps_tensor = false;       // their own software
  job.gradient_dtype = DType::kF32;  // section 3.3.2
  set_degrees(row, row.count("tp"), row.count("pp"), row.count("cp"), job);
  job.layout.cuts_tokens = true;
  job.micro_batches = row.count("batch_per_dp");
  job.chunks = static_cast<int>((job.layers + 2) / job.pp);
  return job;
}

}  // namespace shardbook::validate
