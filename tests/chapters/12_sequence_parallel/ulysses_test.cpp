// Ulysses against attention on one device.

#include "chapters/12_sequence_parallel/ulysses.h"

#include "tests/chapters/12_sequence_parallel/sequence_support.h"

namespace shardbook::sequence_parallel {
namespace {

RankAttention ulysses(const Setting& s) {
  return
      [s](const Tensor& q, const Tensor& k, const Tensor& v, ProcessGroup& cp) {
        return ulysses_attention(q, k, v, options_of(s), cp);
      };
}

void expect_same_values(const Tensors& found, const Tensors& expected) {
  const char* const names[] = {"out", "dq", "dk", "dv"};
  for (std::size_t i = 0; i < 4; ++i) {
    // Values as f64: -0 and 0 are one
    EXPECT_EQ(found[i].to_vector<double>(), expected[i].to_vector<double>())
        << names[i];
  }
}

class UlyssesParity : public testing::TestWithParam<int> {};

TEST_P(UlyssesParity, HasOneDevicesBits) {
  Setting s;
  s.heads = 24;
  for (DType dtype : {DType::kF64, DType::kF32}) {
    for (double dropout : {0.0, 0.3}) {
      for (bool causal : {true, false}) {
        s.dtype = dtype, s.dropout = dropout, s.causal = causal;
        expect_same_values(on_slices(GetParam(), s, ulysses(s)).whole,
                           one_device(s));
      }
    }
  }
}

TEST_P(UlyssesParity, ThereAndBackIsTheIdentity) {
  const int c = GetParam();
  const Tensor whole = noise({2, 24, 48});
  const auto same = on_ranks(c, [&](ProcessGroup& world) {
    const Tensor own =
        cut_sequence(whole, 1, Layout::kContiguous, world.rank(), c);
    const Tensor heads = scatter_heads(own, world);
    // The whole sequence, and this rank's columns
    const std::int64_t w = 48 / c;
    return bitwise_equal(heads, slice(whole, 2, world.rank() * w,
                                      (world.rank() + 1) * w)) &&
           bitwise_equal(gather_heads(heads, world), own.clone());
  });
  for (bool is_same : same) EXPECT_TRUE(is_same);
}

TEST_P(UlyssesParity, GroupedQueriesShareKeys) {
  // Fewer key heads than ranks, as many, and numbers that do not divide: 24
  // query heads and 1, 2, 3, 6 or 8 key heads over 1, 2, 3, 4 or 8 ranks
  Setting s;
  s.heads = 24;
  s.head_dim = 3;
  for (std::int64_t kv_heads : {1, 2, 3, 6, 8}) {
    SCOPED_TRACE(kv_heads);
    s.kv_heads = kv_heads;
    const Tensors found = on_slices(GetParam(), s, ulysses(s)).whole;
    // The gradients of a key head's copies are summed in another order
    expect_all_close(found, one_device(s), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, UlyssesParity,
                         testing::Values(1, 2, 3, 4, 8));

TEST(UlyssesBytes, FourExchangesEachWay) {
  const std::vector<std::string> expected = {
      "forward Q",   "forward K",   "forward V",   "forward O",
      "backward dO", "backward dV", "backward dK", "backward dQ"};
  for (const auto& [c, sequence, heads] :
       {std::tuple{2, 10, 6}, {3, 21, 3}, {4, 24, 8}}) {
    Setting s;
    s.sequence = sequence, s.heads = heads;
    const std::int64_t z = s.batch * s.sequence * s.heads * s.head_dim;
    const OnRanks found = on_slices(c, s, ulysses(s));
    for (const auto& records : found.records) {
      std::vector<std::string> calls;
      for (const CommRecord& record : records) {
        EXPECT_EQ(record.op, CommOp::kAllToAll);
        EXPECT_EQ(record.numel, z / c);
        calls.push_back(std::string(phase_name(record.phase)) + " " +
                        record.label);
      }
      EXPECT_EQ(calls, expected);
      EXPECT_DOUBLE_EQ(elements_of(records), 8.0 * (c - 1) / c / c * z);
    }
  }
}

TEST(UlyssesBytes, KeyHeadsAreSentAsOftenAsTheyAreNeeded) {
  Setting s;
  s.heads = 12;
  for (const auto& [kv_heads, sent] :
       {std::pair{1, 4}, {2, 4}, {4, 4}, {6, 12}, {12, 12}}) {
    s.kv_heads = kv_heads;
    const OnRanks found = on_slices(4, s, ulysses(s));
    for (const CommRecord& record : found.records[1]) {
      const bool is_key = record.label.find_first_of("KV") != std::string::npos;
      const std::int64_t heads = is_key ? sent : 12;
      EXPECT_EQ(record.numel, s.batch * s.sequence / 4 * heads * s.head_dim)
          << record.label;
    }
  }
}

TEST(UlyssesErrors, NameTheSizes) {
  const std::string error = error_on_ranks(4, [](ProcessGroup& world) {
    const Tensor x = noise({1, 4, 6});
    AttentionOptions options;
    options.heads = 6;
    ulysses_attention(x, x, x, options, world);
  });
  expect_text(error, {"6 heads over 4 ranks"});
}

}  // namespace
}  // namespace shardbook::sequence_parallel
