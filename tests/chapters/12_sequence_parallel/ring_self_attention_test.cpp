// Ring self-attention against attention on one device.

#include "chapters/12_sequence_parallel/ring_self_attention.h"

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "tests/chapters/12_sequence_parallel/sequence_support.h"

namespace shardbook::sequence_parallel {
namespace {

RankAttention rsa(const Setting& s, bool all_reduce = false) {
  return [s, all_reduce](const Tensor& q, const Tensor& k, const Tensor& v,
                         ProcessGroup& cp) {
    RsaOptions options;
    options.attention = options_of(s);
    options.all_reduce = all_reduce;
    return ring_self_attention(q, k, v, options, cp);
  };
}

class RsaParity : public testing::TestWithParam<int> {};

void expect_rsa_parity(int c, const Setting& s, double tolerance,
                       bool all_reduce = false) {
  expect_all_close(on_slices(c, s, rsa(s, all_reduce)).whole, one_device(s),
                   tolerance);
}

TEST_P(RsaParity, EqualsOneDevice) {
  for (bool causal : {true, false}) {
    for (bool all_reduce : {true, false}) {
      expect_rsa_parity(GetParam(), {.causal = causal}, kF64, all_reduce);
    }
  }
}

TEST_P(RsaParity, HoldsInF32AndDropsWhatOneDeviceDrops) {
  expect_rsa_parity(GetParam(), {.dtype = DType::kF32}, kF32);
  expect_rsa_parity(GetParam(), {.dropout = 0.3}, kF64);
}

TEST_P(RsaParity, GroupedQueriesShareKeys) {
  for (const std::int64_t kv_heads : {1, 2}) {
    for (const double dropout : {0.0, 0.3}) {
      const Setting s{.kv_heads = kv_heads, .dropout = dropout};
      expect_rsa_parity(GetParam(), s, kF64);
      expect_rsa_parity(GetParam(), s, kF64, /*all_reduce=*/true);
    }
  }
}

TEST_P(RsaParity, RowsOfScoresHaveOneDevicesBits) {
  const int c = GetParam();
  const Tensor q = noise({4, 24, 5}, 1), k = noise({4, 24, 5}, 2);
  Deterministic mode;
  const Tensor whole = matmul(q, k, false, true);
  const auto parts = on_ranks(c, [&](ProcessGroup& world) {
    const auto own = [&](const Tensor& x) {
      return cut_sequence(x, 1, Layout::kContiguous, world.rank(), c);
    };
    return ring_qk(own(q), own(k), world).to_vector<double>();
  });
  for (int rank = 0; rank < c; ++rank) {
    const Tensor rows =
        cut_sequence(whole, 1, Layout::kContiguous, rank, c).clone();
    EXPECT_EQ(parts[static_cast<std::size_t>(rank)], rows.to_vector<double>());
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, RsaParity, testing::Values(1, 2, 3, 4, 8));

TEST(RsaBytes, TwoRingsForwardTwoRingsAndTwoSumsBackward) {
  for (const auto& [c, sequence, kv_heads] :
       {std::tuple{2, 10, 4}, {3, 21, 2}, {4, 24, 1}}) {
    Setting s;
    s.sequence = sequence, s.kv_heads = kv_heads;
    const std::int64_t z = s.batch * s.sequence * s.kv_heads * s.head_dim;
    for (bool all_reduce : {false, true}) {
      const std::string hop = "send " + std::to_string(z / c);
      const std::string sum =
          (all_reduce ? "all_reduce " : "reduce_scatter ") + std::to_string(z);
      std::vector<std::string> expected;
      const auto ring = [&, c = c] {
        for (int i = 1; i < c; ++i) expected.push_back(hop);
      };
      ring(), ring();                   // K and V
      ring(), expected.push_back(sum);  // dP and dV
      ring(), expected.push_back(sum);  // dQ and dK
      const OnRanks found = on_slices(c, s, rsa(s, all_reduce));
      for (const auto& records : found.records) {
        EXPECT_EQ(calls_of(records), expected);
        const double part = (c - 1.0) / c * static_cast<double>(z);
        EXPECT_DOUBLE_EQ(elements_of(records), (all_reduce ? 8 : 6) * part);
      }
    }
  }
}

TEST(RsaMemory, KeepsRowsOfScores) {
  // Memory from forward to backward grows with s^2 / c
  const auto kept = [](int c, std::int64_t s) {
    return on_ranks(c, [s](ProcessGroup& world) {
      const Setting setting{1, s, 2, 0, 4, false};
      Tensors inputs = own_inputs(setting, Layout::kContiguous, world);
      for (Tensor& each : inputs) each = each.clone().set_requires_grad();
      const Device& device = RankContext::current().device;
      const auto before = device.memory().current_total;
      const Tensor out = rsa(setting)(inputs[0], inputs[1], inputs[2], world);
      return device.memory().current_total - before;
    })[0];
  };
  // Softmax keeps its rows: 2 heads (s/c) s values of 8 bytes. In addition q, k
  // and v by heads, and the output: (s/c) 8 values each.
  for (const auto& [c, s] : {std::pair{2, 16}, {3, 27}, {4, 32}}) {
    const std::int64_t n = s / c;
    EXPECT_EQ(kept(c, s), 8 * (2 * n * s + 4 * 8 * n)) << c << " " << s;
  }
}

TEST(RsaErrors, NameTheShapes) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    const Tensor x = noise({1, 4, 6});
    RsaOptions options;
    options.attention.heads = 4;
    ring_self_attention(x, x, x, options, world);
  });
  expect_text(error, {"with 4 heads"});
}

}  // namespace
}  // namespace shardbook::sequence_parallel
