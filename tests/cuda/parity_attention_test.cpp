// Attention on CUDA against attention on the CPU.
//
// 16-bit cases whose head_dim is a multiple of 32 (up to 128) and whose rows
// are aligned run on tensor cores; the same numbers in rows that are four
// elements longer are not aligned, and run on the ordinary cores.

#include <cmath>

#include "core/kernels/attention.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::AttentionArgs;
using kernels::AttentionGradStrides;
using kernels::HeadStrides;
using kernels::noise;
using kernels::tolerance;

struct Sizes {
  std::int64_t batch, heads, kv_heads, q_rows, k_rows, head_dim;
};

// Gradients are sums of many rounded products. In 16 bits the tensor cores
// round weights before they multiply, which the CPU does not.
double forward_slack(DType dtype) { return 4 * tolerance(dtype); }
double backward_slack(DType dtype) { return 16 * tolerance(dtype); }

class AttentionParity : public ParityTest {
 protected:
  AttentionArgs make(const Sizes& sizes, bool causal) const {
    AttentionArgs args;
    args.batch = sizes.batch;
    args.heads = sizes.heads, args.kv_heads = sizes.kv_heads;
    args.q_rows = sizes.q_rows, args.k_rows = sizes.k_rows;
    args.head_dim = sizes.head_dim;
    args.causal = causal;
    args.scale = 1.0 / std::sqrt(static_cast<double>(sizes.head_dim));
    return args;
  }

  // Rows of all heads side by side, as projections leave them, with `padding`
  // elements after each.
  static HeadStrides side_by_side(std::int64_t rows, std::int64_t heads,
                                  std::int64_t dim, std::int64_t padding) {
    const std::int64_t row = heads * dim + padding;
    return {rows * row, dim, row};
  }

  // One array [q | k | v] of rows that are shared: so are its gradients.
  void check_packed(AttentionArgs args) const {
    const std::int64_t dim = args.head_dim, rows = args.q_rows;
    const std::int64_t width = (args.heads + 2 * args.kv_heads) * dim;
    args.q = args.k = args.v = {rows * width, dim, width};
    args.out = side_by_side(rows, args.heads, dim, 0);
    const AttentionGradStrides grads{args.q, args.k, args.v, args.out};
    const std::int64_t keys = args.heads * dim;
    const std::int64_t vals = keys + args.kv_heads * dim;
    const std::int64_t out_size = args.batch * args.out.batch;

    Comparison forward(dtype);
    const Slot qkv = forward.noise(args.batch * rows * width, 1);
    const Slot out = forward.empty(out_size);
    const Slot total = forward.empty(stat, args.batch * args.heads * rows);
    forward.expect_equal_in(
        forward_slack(dtype), [&](const Comparison::Side& on) {
          kernels::attention(on.context, dtype, args, on(qkv),
                             on.from(qkv, keys), on.from(qkv, vals), on(out),
                             on(total));
        });
    if (HasFatalFailure()) return;

    Comparison backward(dtype);
    const Slot x = backward.array(forward.cpu_array(qkv));
    const Slot y = backward.array(forward.cpu_array(out));
    const Slot sums = backward.array(forward.cpu_array(total));
    const Slot dy = backward.noise(out_size, 4);
    const Slot dx = backward.empty(args.batch * rows * width);
    backward.expect_equal_in(
        backward_slack(dtype), [&](const Comparison::Side& on) {
          kernels::attention_backward(
              on.context, dtype, args, grads, on(x), on.from(x, keys),
              on.from(x, vals), on(y), on(dy), on(sums), on(dx),
              on.from(dx, keys), on.from(dx, vals), false);
        });
  }

  void check(AttentionArgs args, std::int64_t padding = 0) const {
    const std::int64_t dim = args.head_dim;
    const HeadStrides q_like =
        side_by_side(args.q_rows, args.heads, dim, padding);
    const HeadStrides k_like =
        side_by_side(args.k_rows, args.kv_heads, dim, padding);
    args.q = args.out = q_like;
    args.k = args.v = k_like;
    const AttentionGradStrides grads{q_like, k_like, k_like, q_like};
    const std::int64_t q_size = args.batch * q_like.batch;
    const std::int64_t k_size = args.batch * k_like.batch;

    // Forward. The CPU's results are what both backwards begin with.
    Comparison forward(dtype);
    const Slot q = forward.array(scaled(3, noise(q_size, 1)));
    const Slot k = forward.noise(k_size, 2);
    const Slot v = forward.noise(k_size, 3);
    const Slot out = forward.empty(q_size);
    const Slot total =
        forward.empty(stat, args.batch * args.heads * args.q_rows);
    forward.expect_equal(kernels::attention, forward_slack(dtype), dtype, args,
                         q, k, v, out, total);
    if (HasFatalFailure()) return;

    for (const bool accumulate : {false, true}) {
      Comparison backward(dtype);
      const auto found = [&](Slot slot) {
        return backward.array(forward.cpu_array(slot));
      };
      const auto result = [&](std::int64_t n, int seed) {
        return accumulate ? backward.noise(n, seed) : backward.empty(n);
      };
      backward.expect_equal(kernels::attention_backward, backward_slack(dtype),
                            dtype, args, grads, found(q), found(k), found(v),
                            found(out), backward.noise(q_size, 4), found(total),
                            result(q_size, 5), result(k_size, 6),
                            result(k_size, 7), accumulate);
      if (HasFatalFailure()) return;
    }
  }

  // On tensor cores, where the dtype has them, and on ordinary ones.
  void check_both(const AttentionArgs& args) const {
    check(args);
    if (dtype_bytes(dtype) == 2) check(args, 4);
  }
};

TEST_P(AttentionParity, SmallAndOddShapes) {
  for (const bool causal : {false, true}) {
    check(make({1, 1, 1, 1, 1, 1}, causal));
    check(make({2, 3, 3, 7, 7, 5}, causal));
    check(make({1, 1, 1, 30, 75, 16}, causal));
    check(make({1, 1, 1, 70, 33, 40}, causal));
  }
}

TEST_P(AttentionParity, NothingToDo) {
  check(make({1, 2, 2, 0, 5, 8}, true));
  check(make({1, 2, 2, 5, 0, 8}, false));
  check(make({0, 2, 2, 5, 5, 8}, true));
  check(make({1, 2, 2, 0, 5, 32}, true));
  check(make({1, 2, 2, 5, 0, 32}, false));
}

TEST_P(AttentionParity, HeadsThatTensorCoresTake) {
  for (const std::int64_t dim : {32, 64, 96, 128}) {
    if (dim != 64 && dtype_bytes(dtype) != 2) continue;
    check_both(make({1, 1, 1, 70, 70, dim}, true));
  }
  check_both(make({2, 2, 2, 33, 20, 64}, false));
}

TEST_P(AttentionParity, WideHeadsInSeveralChunks) {
  check(make({1, 1, 1, 9, 40, 160}, true));
}

TEST_P(AttentionParity, SeveralTilesOfQueriesAndKeys) {
  check_both(make({1, 1, 1, 150, 140, 32}, true));
  check_both(make({1, 1, 1, 20, 300, 32}, false));
  AttentionArgs args = make({1, 1, 1, 50, 300, 24}, true);
  args.q_position = 250;
  check(args);
}

TEST_P(AttentionParity, SharesKeyHeadsAmongQueryHeads) {
  check(make({2, 4, 2, 9, 13, 8}, false));
  check_both(make({1, 6, 2, 40, 40, 32}, true));
}

// Widths of published heads, on tensor cores where they are 32 times something.
TEST_P(AttentionParity, SharesKeysOfPackedRows) {
  check_packed(make({2, 4, 2, 20, 20, 16}, true));
  check_packed(make({1, 6, 2, 34, 34, 32}, true));
  check_packed(make({1, 2, 1, 20, 20, 80}, true));
  if (dtype_bytes(dtype) != 2) return;
  for (const std::int64_t dim : {64, 96, 128}) {
    check_packed(make({1, 2, 1, 20, 20, dim}, true));
  }
}

// Pieces of a sequence: some queries see nothing, some everything.
TEST_P(AttentionParity, KnowsThePositionsOfItsPieces) {
  for (const std::int64_t q_position : {10, 5, -20, -90}) {
    AttentionArgs args = make({1, 2, 2, 40, 20, 8}, true);
    args.q_position = q_position;
    check(args);
    args.head_dim = 32;
    check_both(args);
  }
}

TEST_P(AttentionParity, DropsProbabilitiesByGlobalIndex) {
  AttentionArgs args = make({2, 2, 2, 30, 30, 16}, true);
  args.dropout = 0.3;
  args.dropout_key = {5, 6};
  args.dropout_view = kernels::whole_view({2, 2, 30, 30});
  check(args);
  // The second half of the heads of a larger model, with an odd row length.
  args.dropout_view = {{2, 2, 30, 30}, {4, 4, 60, 61}, {1, 2, 0, 30}, {}};
  args.head_dim = 32;
  check_both(args);
  // Every second key
  args.dropout_view = {{2, 2, 30, 30}, {2, 2, 30, 60}, {}, {1, 1, 1, 2}};
  check_both(args);
}

// Rows of a larger result; some that either side has not seen.
TEST_P(AttentionParity, MergesTwoResults) {
  for (const std::int64_t rows : {1, 5, 40}) {
    constexpr std::int64_t kBatch = 2, kHeads = 3, kDim = 7;
    const std::int64_t all_rows = rows + 3, width = kHeads * kDim;
    kernels::AttentionMergeArgs args;
    args.batch = kBatch, args.heads = kHeads, args.rows = rows;
    args.head_dim = kDim;
    args.out = side_by_side(all_rows, kHeads, kDim, 0);
    args.block_out = side_by_side(rows, kHeads, kDim, 0);
    args.logsumexp_head = all_rows;
    std::vector<double> totals = noise(kBatch * kHeads * all_rows, 3);
    std::vector<double> block_totals = noise(kBatch * kHeads * rows, 4);
    totals[0] = -kernels::kInf;
    block_totals.back() = -kernels::kInf;
    Comparison c(dtype);
    c.expect_equal(
        kernels::attention_merge, tolerance(stat), dtype, args,
        c.noise(kBatch * rows * width, 1), c.array(stat, block_totals),
        c.noise(stat, kBatch * all_rows * width, 2), c.array(stat, totals));
  }
}

SB_OVER_FLOATING_DTYPES(AttentionParity);

}  // namespace
}  // namespace shardbook::parity
