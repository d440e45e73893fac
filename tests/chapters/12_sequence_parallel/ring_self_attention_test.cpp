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

TEST_P(RsaParity, EqualsOneDevice) {
  Setting s;
  for (bool causal : {true, false}) {
    for (bool all_reduce : {true, false}) {
      s.causal = causal;
      expect_all_close(on_slices(GetParam(), s, rsa(s, all_reduce)).whole,
                       one_device(s), kF64);
    }
  }
}

TEST_P(RsaParity, HoldsInF32) {
  Setting s;
  s.dtype = DType::kF32;
  expect_all_close(on_slices(GetParam(), s, rsa(s)).whole, one_device(s), kF32);
}

TEST_P(RsaParity, DropsWhatOneDeviceDrops) {
  Setting s;
  s.dropout = 0.3;
  expect_all_close(on_slices(GetParam(), s, rsa(s)).whole, one_device(s), kF64);
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

std::vector<std::string> calls_of(const std::vector<CommRecord>& records) {
  std::vector<std::string> calls;
  for (const CommRecord& record : records) {
    if (record.op == CommOp::kRecv) continue;
    calls.push_back(std::string(comm_op_name(record.op)) + " " +
                    std::to_string(record.numel));
  }
  return calls;
}

TEST(RsaBytes, TwoRingsForwardTwoRingsAndTwoSumsBackward) {
  for (const auto& [c, sequence] : {std::pair{2, 10}, {3, 21}, {4, 24}}) {
    Setting s;
    s.sequence = sequence;
    const std::int64_t z = s.batch * s.sequence * s.heads * s.head_dim;
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
        double elements = 0;
        for (const CommRecord& r : records) elements += wire_elements(r);
        const double part = (c - 1.0) / c * static_cast<double>(z);
        EXPECT_DOUBLE_EQ(elements, (all_reduce ? 8 : 6) * part);
      }
    }
  }
}

TEST(RsaMemory, KeepsRowsOfScores) {
  // What lives from forward to backward grows with s^2 / c
  const auto kept = [](int c, std::int64_t s) {
    return on_ranks(c, [s](ProcessGroup& world) {
      const Setting setting{1, s, 2, 0, 4, false};
      Tensors inputs;
      for (const Tensor& whole : whole_inputs(setting)) {
        inputs.push_back(cut_sequence(whole, 1, Layout::kContiguous,
                                      world.rank(), world.size())
                             .clone()
                             .set_requires_grad());
      }
      const Device& device = RankContext::current().device;
      const auto before = device.memory().current_total;
      RsaOptions options;
      options.attention = options_of(setting);
      const Tensor out =
          ring_self_attention(inputs[0], inputs[1], inputs[2], options, world);
      return device.memory().current_total - before;
    })[0];
  };
  // Softmax keeps its rows: 2 heads (s/c) s values of 8 bytes. Beside them are
  // q, k and v head by head, and the output: (s/c) 8 values each.
  for (const auto& [c, s] : {std::pair{2, 16}, {3, 27}, {4, 32}}) {
    const std::int64_t n = s / c;
    EXPECT_EQ(kept(c, s), 8 * (2 * n * s + 4 * 8 * n)) << c << " " << s;
  }
}

// --- Traps: what the original does -----------------------------------------------

TEST(RsaTraps, GradientsDividedByTheRanksAreWrong) {
  // Colossal-AI divides dQ, dK and dV by c inside the operators
  Setting s;
  const int c = 4;
  const Tensors expected = one_device(s);
  Tensors quirk =
      on_slices(
          c, s,
          [s](const Tensor& q, const Tensor& k, const Tensor& v,
              ProcessGroup& cp) {
            const auto divided = [&](const Tensor& x) {
              return autograd::custom_function(
                  "quirk", {x},
                  [](const Tensors& in) { return Tensors{in[0].clone()}; },
                  [](const Tensors& grads) {
                    return Tensors{scale(grads[0], 1.0 / c)};
                  })[0];
            };
            return rsa(s)(divided(q), divided(k), divided(v), cp);
          })
          .whole;
  EXPECT_LT(largest_difference(
                {quirk[0], expected[1], expected[2], expected[3]}, expected),
            1e-12);  // The forward does not show it
  for (std::size_t i = 1; i < 4; ++i) {
    Tensors only = expected;
    only[i] = quirk[i];
    EXPECT_GT(largest_difference(only, expected), 0.1);
    expect_close(scale(quirk[i], c), expected[i], 1e-12);
  }
}

TEST(RsaTraps, ScoresScaledByTheHiddenSizeAreWrong) {
  Setting s;
  const Tensors expected = one_device(s);
  const Tensors quirk =
      on_slices(3, s,
                [s](const Tensor& q, const Tensor& k, const Tensor& v,
                    ProcessGroup& cp) {
                  RsaOptions options;
                  options.attention = options_of(s);
                  options.attention.scale =
                      1 / std::sqrt(static_cast<double>(s.heads * s.head_dim));
                  return ring_self_attention(q, k, v, options, cp);
                })
          .whole;
  EXPECT_GT(largest_difference(quirk, expected), 0.1);
}

TEST(RsaErrors, NameTheShapes) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    const Tensor x = noise({1, 4, 6});
    RsaOptions options;
    options.attention.heads = 4;
    ring_self_attention(x, x, x, options, world);
  });
  EXPECT_NE(error.find("with 4 heads"), std::string::npos) << error;
}

}  // namespace
}  // namespace shardbook::sequence_parallel
