// Attention in blocks against attention in one piece.

#include "core/attention_block.h"

#include <limits>

#include "tests/core/support.h"

namespace shardbook {
namespace {

struct Pieces {
  Tensor q = noise({2, 6, 8}, 1, -3, 3), k = noise({2, 10, 8}, 2, -3, 3),
         v = noise({2, 10, 8}, 3);
  AttentionOptions options = attention_of(2, false);
  AttentionSums of(std::int64_t from, std::int64_t to) const {
    return attention_block(q, k, v, {{0, 6}, {from, to}, false, 0}, options,
                           {});
  }
};

TEST(MergeAttention, TwoBlocksAreTheWhole) {
  const Pieces p;
  const AttentionSums whole = p.of(0, 10);
  for (std::int64_t cut : {1, 4, 9}) {
    for (bool swapped : {false, true}) {
      AttentionSums sums = swapped ? p.of(cut, 10) : p.of(0, cut);
      merge_attention(sums, 0, swapped ? p.of(0, cut) : p.of(cut, 10));
      expect_close(sums.out, whole.out, 1e-13);
      expect_close(sums.logsumexp, whole.logsumexp, 1e-13);
    }
  }
}

TEST(MergeAttention, DoesNotOverflow) {
  // log(e^lse + e^lse_b) of scores near 4000 would be infinite
  Pieces p;
  p.options.scale = 400;
  AttentionSums sums = p.of(0, 4);
  merge_attention(sums, 0, p.of(4, 10));
  const AttentionSums whole = p.of(0, 10);
  EXPECT_GT(values(whole.logsumexp)[0], 710);
  expect_close(sums.out, whole.out, 1e-10);
  expect_close(sums.logsumexp, whole.logsumexp, 1e-12);
}

/// The formula without the special case for -inf.
void naive_merge(const AttentionSums& sums, const AttentionSums& block) {
  const auto heads = sums.logsumexp.size(1), rows = sums.out.size(1);
  const auto width = sums.out.size(2) / heads;
  const auto lse = values(sums.logsumexp), lse_b = values(block.logsumexp);
  auto out = values(sums.out), total = lse;
  const auto out_b = values(block.out);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double w = 1 / (1 + std::exp(lse[i] - lse_b[i]));
    total[i] = lse[i] + std::log1p(std::exp(lse_b[i] - lse[i]));
    const auto at = static_cast<std::int64_t>(i);
    const auto b = at / rows / heads, h = at / rows % heads, r = at % rows;
    for (std::int64_t d = 0; d < width; ++d) {
      const auto e =
          static_cast<std::size_t>(((b * rows + r) * heads + h) * width + d);
      out[e] -= w * (out[e] - out_b[e]);
    }
  }
  sums.out.copy_from(Tensor::from_values<double>(out, sums.out.shape()));
  sums.logsumexp.copy_from(
      Tensor::from_values<double>(total, sums.logsumexp.shape()));
}

TEST(MergeAttention, RowsWithoutKeysAreSkipped) {
  const Pieces p;
  const double nothing = -std::numeric_limits<double>::infinity();
  // Keys 6..9 come after all queries: the block is empty, row by row
  const auto hidden = [&] {
    return attention_block(p.q, p.k, p.v, {{0, 6}, {6, 10}, true, -6},
                           p.options, {});
  };
  for (double x : values(hidden().logsumexp)) EXPECT_EQ(x, nothing);
  // Merging nothing into a result changes nothing
  AttentionSums sums = p.of(0, 6);
  merge_attention(sums, 0, hidden());
  EXPECT_TRUE(bitwise_equal(sums.out, p.of(0, 6).out));
  EXPECT_TRUE(bitwise_equal(sums.logsumexp, p.of(0, 6).logsumexp));
  // Nothing into nothing is nothing, not NaN; the formula alone gives NaN
  AttentionSums empty = hidden(), naive = hidden();
  merge_attention(empty, 0, hidden());
  for (double x : values(empty.out)) EXPECT_EQ(x, 0);
  for (double x : values(empty.logsumexp)) EXPECT_EQ(x, nothing);
  naive_merge(naive, hidden());
  EXPECT_TRUE(std::isnan(values(naive.out)[0]));
  // Merging a first block into nothing keeps its bits
  AttentionSums first = hidden();
  merge_attention(first, 0, p.of(0, 6));
  EXPECT_TRUE(bitwise_equal(first.out, p.of(0, 6).out));
}

TEST(MergeAttention, SomeRowsOfAResult) {
  const Pieces p;
  AttentionSums sums = p.of(0, 5);
  merge_attention(sums, 2,
                  attention_block(p.q, p.k, p.v, {{2, 5}, {5, 10}, false, 0},
                                  p.options, {}));
  const Tensor whole = p.of(0, 10).out, half = p.of(0, 5).out;
  expect_close(slice(sums.out, 1, 0, 2), slice(half, 1, 0, 2), 0);
  expect_close(slice(sums.out, 1, 2, 5), slice(whole, 1, 2, 5), 1e-13);
  expect_close(slice(sums.out, 1, 5, 6), slice(half, 1, 5, 6), 0);
  expect_error([&] { merge_attention(sums, 4, p.of(0, 5)); }, {"at row 4"});
}

// --- Blocks ------------------------------------------------------------------

AttentionOptions grouped() {
  AttentionOptions options = attention_of(4);
  options.kv_heads = 2;
  return options;
}

TEST(AttentionBlocks, BackwardsAddUpToTheWhole) {
  // Causal attention of 9 queries to 9 keys, in arbitrary pieces
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    const double tolerance = dtype == DType::kF64 ? 1e-12 : 0.05;
    const TensorOptions like{dtype, Device()};
    const Tensor q = leaf({2, 9, 20}, 1, -2, 2, like),
                 k = leaf({2, 9, 10}, 2, -2, 2, like),
                 v = leaf({2, 9, 10}, 3, -2, 2, like);
    const Tensor out = attention(q, k, v, grouped());
    const Tensor dout = noise({2, 9, 20}, 4, -1, 1, like);
    autograd::backward({out}, {dout});

    const std::vector<AttentionBlock> blocks = {{{0, 4}, {0, 4}, true, 0},
                                                {{4, 9}, {0, 3}, false, 0},
                                                {{4, 9}, {3, 9}, true, 1}};
    const NoGrad no_grad;
    const DType sums = dtype == DType::kF64 ? dtype : DType::kF32;
    const auto zeros = [&](const Tensor& x) {
      return Tensor::zeros(x.shape(), {sums, x.device()});
    };
    AttentionSums complete = {
        zeros(q),
        Tensor::full({2, 4, 9}, -std::numeric_limits<double>::infinity(),
                     {sums, q.device()})};
    for (const AttentionBlock& block : blocks) {
      merge_attention(complete, block.queries.begin,
                      attention_block(q, k, v, block, grouped(), {}));
    }
    expect_close(to_dtype(complete.out, dtype), out.detach(), tolerance);

    complete.out = to_dtype(complete.out, dtype);
    const Tensor dq = zeros(q), dk = zeros(k), dv = zeros(v);
    for (const AttentionBlock& block : blocks) {
      attention_block_backward(q, k, v, complete, dout, block, grouped(), {},
                               dq, dk, dv);
    }
    expect_close(to_dtype(dq, dtype), q.grad(), tolerance);
    expect_close(to_dtype(dk, dtype), k.grad(), tolerance);
    expect_close(to_dtype(dv, dtype), v.grad(), tolerance);
  }
}

TEST(AttentionBlocks, CostWhatTheirMaskLeaves) {
  const Pieces p;
  for (const AttentionBlock& block : {AttentionBlock{{0, 6}, {0, 10}, false, 0},
                                      {{2, 6}, {1, 3}, false, 0},
                                      {{0, 6}, {0, 6}, true, 0},
                                      {{0, 6}, {0, 6}, true, -1},
                                      {{0, 6}, {0, 10}, true, 3},
                                      {{0, 6}, {0, 10}, true, -8},
                                      {{1, 4}, {0, 2}, true, 5}}) {
    double pairs = 0;
    for (std::int64_t i = 0; i < block.queries.size(); ++i) {
      for (std::int64_t j = 0; j < block.keys.size(); ++j) {
        if (!block.causal || i + block.shift >= j) ++pairs;
      }
    }
    EXPECT_EQ(visible_pairs(block), pairs);
    const auto seen = std::make_shared<SeenOps>();
    RankContext::current().add_observer(seen);
    attention_block(p.q, p.k, p.v, block, p.options, {});
    RankContext::current().remove_observer(seen);
    // Two products; [2 batch rows x 2 heads] of 4 columns; 2 flops each
    EXPECT_EQ(seen->flops_of("attention"), 2 * 2 * pairs * 2 * 2 * 4);
  }
}

TEST(AttentionBlocks, SayWhatDoesNotFit) {
  const Pieces p;
  const auto error = [&](const AttentionBlock& block,
                         const AttentionOptions& options) {
    return error_of(
        [&] { attention_block(p.q, p.k, p.v, block, options, {}); });
  };
  expect_text(error({{0, 7}, {0, 10}, false, 0}, p.options),
              {"queries 0 to 7", "[2, 6, 8]"});
  AttentionOptions one_key_head = p.options;
  one_key_head.kv_heads = 1;
  expect_text(error({{0, 6}, {0, 10}, false, 0}, one_key_head),
              {"2 heads of queries and 1 of keys"});
}

TEST(Attention, SharesKeyHeadsAmongConsecutiveQueryHeads) {
  // As if each key head existed twice
  const Tensor q = leaf({2, 7, 20}, 1), k = leaf({2, 7, 10}, 2),
               v = leaf({2, 7, 10}, 3);
  const auto twice = [](const Tensor& x) {
    const Tensor one = reshape(x, {2, 7, 2, 1, 5});
    return reshape(concat({one, one}, 3), {2, 7, 20});
  };
  const auto run = [&](bool shared) {
    for (const Tensor& x : {q, k, v}) x.clear_grad();
    AttentionOptions options = grouped();
    Tensor out;
    if (shared) {
      out = attention(q, k, v, options);
    } else {
      options.kv_heads = 4;
      out = attention(q, twice(k), twice(v), options);
    }
    weighted_sum(out).backward();
    return Tensors{out.detach(), q.grad(), k.grad(), v.grad()};
  };
  expect_close(run(true), run(false), 1e-13);
  AttentionOptions options = grouped();
  expect_error([&] { attention(q, twice(k), twice(v), options); },
               {"width 20", "2 of 4 heads"});
}

}  // namespace
}  // namespace shardbook
