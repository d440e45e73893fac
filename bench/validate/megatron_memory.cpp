#include "bench/validate/megatron_memory.h"

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr double kMiB = 1 << 20;

double tokens(const HybridJob& job) {
  return static_cast<double>(job.layout.micro_batch * job.sizes.seq);
}
/// Korthikanti's sbh, and as^2b.
double units(const HybridJob& job) {
  return tokens(job) * static_cast<double>(job.sizes.hidden);
}
double scores(const HybridJob& job) {
  return tokens(job) * static_cast<double>(job.sizes.seq * job.sizes.heads);
}

/// Bytes of parameters, gradients and optimizer.
double states(const HybridJob& job) {
  zero::StateBytes bytes;
  // With BF16, Megatron-LM sums gradients in f32; with f16 the f32 copies of
  // the gradients live only in the update
  if (job.layout.dtype == DType::kBF16) bytes.gradient = 4;
  return zero::model_states(job.zero_stage, last_stage_parameters(job), job.dp,
                            bytes)
      .total();
}

}  // namespace

double last_stage_parameters(const HybridJob& job) {
  const auto h = static_cast<double>(job.sizes.hidden);
  const double t = job.layout.tp;
  const double layers = static_cast<double>(job.layers) / job.pp;
  const double table = static_cast<double>(job.sizes.vocabulary) * h / t;
  double parameters =
      layers * ((12 * h * h + 7 * h) / t + 6 * h) + 2 * h + table;
  if (job.pp == 1) {
    parameters += static_cast<double>(job.sizes.seq) * h;  // positions
    if (!job.is_tied) parameters += table;
  }
  return parameters;
}

double layer_activations(const HybridJob& job, bool fuses_attention) {
  const double t = job.layout.tp;
  if (job.layout.recompute == Recompute::kBlocks) {
    return 2 * units(job) / (job.layout.cuts_tokens ? t : 1);
  }
  const double linear =
      units(job) * (job.layout.cuts_tokens ? 34 / t : 10 + 24 / t);
  if (!fuses_attention) return linear + 5 * scores(job) / t;
  // Its output once more, as it wrote it, and sums in f32
  return linear + 2 * units(job) / t +
         4 * tokens(job) * static_cast<double>(job.sizes.heads) / t;
}

MegatronMemory megatron_memory(const HybridJob& job,
                               const MegatronSoftware& software) {
  SB_CHECK(job.chunks == 1, "Megatron-LM's memory is known of 1F1B, not of ",
           job.chunks, " chunks per rank");
  SB_CHECK(job.layers % job.pp == 0, job.layers, " layers do not divide by pp ",
           job.pp);
  const double t = job.layout.tp;
  MegatronMemory memory;
  memory.states = states(job);
  memory.activations = static_cast<double>(job.layers) / job.pp *
                       layer_activations(job, software.fuses_attention);
  // Forward: logits in 16 bits, and copied to f32. Backward: their gradient in
  // f32, copied to 16 bits
  constexpr double kBytesPerLogit = 2 + 4;
  memory.loss = kBytesPerLogit * tokens(job) *
                static_cast<double>(job.sizes.vocabulary) / t;
  // The forward and the backward thread have a cuBLAS handle each, whose
  // workspace is 32 MiB where results must repeat
  // (CUBLAS_WORKSPACE_CONFIG=:4096:8)
  memory.buffers = 2 * 32 * kMiB;
  // The causal mask, which is part of a batch: a byte per pair
  memory.buffers += tokens(job) * static_cast<double>(job.sizes.seq);
  if (software.has_transformer_engine) {
    memory.buffers += software.product_workspace;
  } else if (!software.fuses_attention) {
    memory.buffers += 2 * scores(job) / t;  // a buffer that all layers share
  }
  // The stage's input, and the gradient that it returns
  if (job.pp > 1) memory.buffers += 2 * 2 * units(job);
  return memory;
}

}  // namespace shardbook::validate
