// The work of a step, by which rates are printed.

#include "chapters/planner/step.h"

namespace shardbook::planner {
namespace {

/// Of all heads: the width of queries and of values.
double attention_width(const DecoderSizes& sizes) {
  return static_cast<double>(sizes.heads * sizes.head_width());
}

}  // namespace

double weight_products(const HybridJob& job) {
  const DecoderSizes& sizes = job.sizes;
  const auto h = static_cast<double>(sizes.hidden);
  const double keys =
      static_cast<double>(sizes.key_heads()) / static_cast<double>(sizes.heads);
  const double visited =
      sizes.experts > 0 ? static_cast<double>(sizes.experts_per_token) : 1;
  return h * attention_width(sizes) * (2 + 2 * keys) +
         visited * h * static_cast<double>(sizes.mlp_width()) *
             (sizes.is_llama && sizes.is_gated ? 3 : 2);
}

double attention_products(const HybridJob& job) {
  return 2 * static_cast<double>(job.sizes.seq) * attention_width(job.sizes);
}

double model_flops(const HybridJob& job) {
  return 6 * job.tokens() *
         (static_cast<double>(job.layers) *
              (weight_products(job) + attention_products(job)) +
          static_cast<double>(job.sizes.vocabulary * job.sizes.hidden));
}

double recomputed_flops(const HybridJob& job) {
  return model_flops(job) +
         2 * job.tokens() * static_cast<double>(job.layers) *
             (weight_products(job) + attention_products(job));
}

}  // namespace shardbook::planner
