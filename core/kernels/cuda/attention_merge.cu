// The merge of two attentions. A thread owns elements of the result, a grid
// apart; a second launch then updates logsumexp, which the first one reads.

#include <cmath>

#include "core/kernels/attention.h"
#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

namespace {

template <typename T>
__global__ void merge_outputs(AttentionMergeArgs args, std::int64_t n,
                              const T* block, const Compute<T>* block_totals,
                              Compute<T>* out, const Compute<T>* totals) {
  using S = Compute<T>;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t d = i % args.head_dim;
    const std::int64_t row = i / args.head_dim % args.rows;
    const std::int64_t head = i / args.head_dim / args.rows;
    const std::int64_t b = head / args.heads, h = head % args.heads;
    const S block_total = block_totals[head * args.rows + row];
    if (block_total == minus_infinity<S>()) continue;
    const S total = totals[head * args.logsumexp_head + row];
    const S x = widen(block[b * args.block_out.batch + h * args.block_out.head +
                            row * args.block_out.row + d]);
    S& sum =
        out[b * args.out.batch + h * args.out.head + row * args.out.row + d];
    const S share = S(1) / (S(1) + std::exp(total - block_total));
    sum = total == minus_infinity<S>() ? x : sum - share * (sum - x);
  }
}

template <typename S>
__global__ void merge_totals(AttentionMergeArgs args, std::int64_t n,
                             const S* block_totals, S* totals) {
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const S block_total = block_totals[i];
    if (block_total == minus_infinity<S>()) continue;
    S& total = totals[i / args.rows * args.logsumexp_head + i % args.rows];
    const S x = total - block_total;
    total =
        total == minus_infinity<S>()
            ? block_total
            : total + (x < 0 ? -x : S(0)) + std::log1p(std::exp(-std::fabs(x)));
  }
}

}  // namespace

void attention_merge(KernelContext& context, DType dtype,
                     const AttentionMergeArgs& args, const void* block_out,
                     const void* block_logsumexp, void* out, void* logsumexp) {
  with_floating("attention_merge", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const std::int64_t rows = args.batch * args.heads * args.rows;
    const std::int64_t n = rows * args.head_dim;
    const auto* const block_totals = static_cast<const S*>(block_logsumexp);
    auto* const totals = static_cast<S*>(logsumexp);
    launch(context, "attention_merge", blocks_for(n), kBlock, merge_outputs<T>,
           args, n, static_cast<const T*>(block_out), block_totals,
           static_cast<S*>(out), totals);
    launch(context, "attention_merge", blocks_for(rows), kBlock,
           merge_totals<S>, args, rows, block_totals, totals);
  });
}

SHARDBOOK_CUDA_KERNEL(attention_merge);

}  // namespace shardbook::kernels::cuda
