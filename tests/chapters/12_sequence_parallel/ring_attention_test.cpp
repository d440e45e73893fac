// Ring attention against attention on one device.

#include "chapters/12_sequence_parallel/ring_attention.h"

#include "tests/chapters/12_sequence_parallel/sequence_support.h"

namespace shardbook::sequence_parallel {
namespace {

RankAttention ring(const Setting& s, Layout layout) {
  return [s, layout](const Tensor& q, const Tensor& k, const Tensor& v,
                     ProcessGroup& cp) {
    RingOptions options;
    options.attention = options_of(s);
    options.layout = layout;
    return ring_attention(q, k, v, options, cp);
  };
}

/// Ring attention of tokens in this layout.
OnRanks on_ring(int c, const Setting& s, Layout layout) {
  return on_tokens(c, s, layout, ring(s, layout));
}

class RingAttentionParity : public testing::TestWithParam<int> {};

void expect_one_device(int c, const Setting& s, double tolerance) {
  for (Layout layout : all_layouts()) {
    SCOPED_TRACE(layout_name(layout));
    expect_all_close(on_ring(c, s, layout).whole, one_device(s), tolerance);
  }
}

TEST_P(RingAttentionParity, EqualsOneDeviceInEveryLayout) {
  for (bool causal : {true, false}) {
    for (double dropout : {0.0, 0.3}) {
      expect_one_device(GetParam(),
                        {.sequence = 48, .causal = causal, .dropout = dropout},
                        kF64);
    }
  }
}

TEST_P(RingAttentionParity, HoldsInF32AndForGroupedQueries) {
  expect_one_device(GetParam(), {.sequence = 48, .dtype = DType::kF32}, kF32);
  expect_one_device(GetParam(), {.sequence = 48, .kv_heads = 2}, kF64);
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, RingAttentionParity,
                         testing::Values(1, 2, 3, 4, 8));

TEST(RingAttention, OneRankIsOneDeviceBitForBit) {
  Setting s;
  const OnRanks one = on_ring(1, s, Layout::kZigzag);
  const Tensors expected = one_device(s);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(bitwise_equal(one.whole[i], expected[i]));
  }
  EXPECT_TRUE(one.records[0].empty());
}

TEST(RingAttention, SumsOf16BitsAreKeptInF32) {
  // One rounding at the end: as accurate as one device
  expect_one_device(8, {.sequence = 64, .dtype = DType::kBF16}, 0.05);
}

// Blocks of equal weight, 256 in the first one and 0 in the others: their mean
// is 32. A mean that is rounded to bf16 at every hop ends at 32.25 on rank 0.
TEST(RingAttention, MergesAreRoundedOnceAtTheEnd) {
  const auto outs = on_ranks(8, [](ProcessGroup& world) {
    const TensorOptions bf16{DType::kBF16, Device()};
    const Tensor q = Tensor::zeros({1, 2, 4}, bf16);
    const Tensor v =
        Tensor::full({1, 2, 4}, world.rank() == 0 ? 256.0 : 0.0, bf16);
    RingOptions options;
    options.attention.heads = 2;
    options.attention.causal = false;
    return ring_attention(q, q, v, options, world).to_vector<double>();
  });
  for (const std::vector<double>& out : outs) {
    EXPECT_EQ(out, std::vector<double>(8, 32.0));
  }
}

std::vector<std::string> sends_of(const std::vector<CommRecord>& records) {
  std::vector<std::string> sends;
  for (const CommRecord& record : records) {
    if (record.op != CommOp::kSend) continue;
    sends.push_back(std::string(phase_name(record.phase)) + " " +
                    dtype_name(record.dtype) + " " +
                    std::to_string(record.numel));
  }
  return sends;
}

TEST(RingAttentionBytes, EveryHopIsAsTheFormulaSays) {
  Setting s;
  s.batch = 2, s.sequence = 24, s.heads = 4, s.kv_heads = 2, s.head_dim = 4;
  for (DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    s.dtype = dtype;
    for (int c : {2, 3, 4}) {
      const std::string z =
          std::to_string(s.batch * s.sequence / c * s.kv_heads * s.head_dim);
      const std::string elements = std::string(dtype_name(dtype)) + " " + z;
      const std::string sums =
          std::string(dtype == DType::kF64 ? "f64" : "f32") + " " + z;
      std::vector<std::string> expected;
      // K, then V
      for (int i = 0; i < 2 * (c - 1); ++i) {
        expected.push_back("forward " + elements);
      }
      for (int step = 0; step < c; ++step) {
        if (step + 1 < c) {
          expected.push_back("backward " + elements);
          expected.push_back("backward " + elements);
        }
        // dK and dV leave after the computation of their block
        expected.push_back("backward " + sums);
        expected.push_back("backward " + sums);
      }
      for (Layout layout : all_layouts()) {
        for (const auto& records : on_ring(c, s, layout).records) {
          EXPECT_EQ(sends_of(records), expected);
        }
      }
    }
  }
}

TEST(RingAttentionBytes, ConstantKeysCauseNoHopsOfGradients) {
  const auto sends = on_ranks(2, [](ProcessGroup& world) {
    const Setting s;
    const Tensors inputs = whole_inputs(s);
    const Tensor q = inputs[0].clone().set_requires_grad();
    const Tensor out =
        ring(s, Layout::kContiguous)(q, inputs[1], inputs[2], world);
    autograd::backward({out}, {inputs[3]});
    return sends_of(world.records()).size();
  });
  EXPECT_EQ(sends[0], 4u);  // K and V, forward and backward
}

TEST(RingAttentionErrors, NameTheSizes) {
  const Setting s{.sequence = 12};
  expect_text(error_on_ranks(4,
                             [&](ProcessGroup& world) {
                               const Tensors own =
                                   own_inputs(s, Layout::kContiguous, world);
                               ring(s, Layout::kZigzag)(own[0], own[1], own[2],
                                                        world);
                             }),
              {"multiple of 8"});
}

}  // namespace
}  // namespace shardbook::sequence_parallel
