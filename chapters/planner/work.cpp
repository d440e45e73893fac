#include "chapters/planner/work.h"

namespace shardbook::planner {

double tokens_of(const HybridJob& job) {
  return static_cast<double>(job.micro_batches * job.layout.micro_batch *
                             job.sizes.seq) *
         job.dp;
}

namespace {

/// Of all heads: the width of queries and of values.
double attention_width(const DecoderSizes& sizes) {
  return static_cast<double>(sizes.head_dim > 0 ? sizes.heads * sizes.head_dim
                                                : sizes.hidden);
}

}  // namespace

double weight_products(const HybridJob& job) {
  const auto h = static_cast<double>(job.sizes.hidden);
  const auto heads = static_cast<double>(job.sizes.heads);
  const double kv =
      job.sizes.kv_heads > 0 ? static_cast<double>(job.sizes.kv_heads) : heads;
  const double mlp =
      job.sizes.mlp > 0 ? static_cast<double>(job.sizes.mlp) : 4 * h;
  const double visited = job.sizes.experts > 0
                             ? static_cast<double>(job.sizes.experts_per_token)
                             : 1;
  return h * attention_width(job.sizes) * (2 + 2 * kv / heads) +
         visited * h * mlp * (job.sizes.is_llama && job.sizes.is_gated ? 3 : 2);
}

double attention_products(const HybridJob& job) {
  return 2 * static_cast<double>(job.sizes.seq) * attention_width(job.sizes);
}

double model_flops(const HybridJob& job) {
  return 6 * tokens_of(job) *
         (static_cast<double>(job.layers) *
              (weight_products(job) + attention_products(job)) +
          static_cast<double>(job.sizes.vocabulary * job.sizes.hidden));
}

double recomputed_flops(const HybridJob& job) {
  return model_flops(job) +
         2 * tokens_of(job) * static_cast<double>(job.layers) *
             (weight_products(job) + attention_products(job));
}

}  // namespace shardbook::planner
