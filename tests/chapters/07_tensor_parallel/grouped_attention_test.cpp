// Grouped queries over ranks against attention on one device.

#include "chapters/07_tensor_parallel/grouped_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/support/errors.h"
#include "tests/support/larger.h"

namespace shardbook::tensor_parallel {
namespace {

constexpr std::int64_t kWidth = 24, kHeads = 8, kHeadDim = 3;
// Sums over heads and keys add in another order.
constexpr double kAnotherOrder = 1e-11;

GroupedShape grouped_shape(std::int64_t groups, double dropout = 0) {
  return {kWidth, kHeads, groups, /*stddev=*/0.5, dropout};
}

Tensor input() { return noise({2, 5, kWidth}, 1); }
Tensor output_gradient() { return noise({2, 5, kWidth}, 2); }

Linear whole_projection(const std::string& kind, std::int64_t out) {
  Linear whole;
  whole.weight =
      make_parameter("a." + kind + ".weight", {kWidth, out}, 0.5, f64_init());
  whole.bias = make_constant_parameter({out}, 0, f64_init());
  // A bias of zero would hide its gradient and its cut
  whole.bias.copy_from(noise({out}, stream_of(kind)));
  return whole;
}

/// One device: three whole projections around core's attention.
struct OneDevice {
  Linear q, k, v, o;
  Tensor x, y;

  OneDevice(std::int64_t groups, double dropout)
      : q(whole_projection("q_proj", kWidth)),
        k(whole_projection("k_proj", groups * kHeadDim)),
        v(whole_projection("v_proj", groups * kHeadDim)),
        o(whole_projection("o_proj", kWidth)),
        x(input().set_requires_grad()) {
    AttentionOptions options;
    options.heads = kHeads;
    options.kv_heads = groups;
    options.dropout = dropout;
    y = o(attention(q(x), k(x), v(x), options));
    autograd::backward({y}, {output_gradient()});
  }
};

Shards of_bias(Shards shards) {
  for (Shard& shard : shards) shard.dim = 0;
  return shards;
}

/// Copies one device's values to this rank's parameters.
void take_biases(GroupedAttention& part, const OneDevice& whole,
                 const Shards& q, const Shards& kv) {
  part.q_proj.bias.copy_from(take_part(whole.q.bias.detach(), of_bias(q)));
  part.k_proj.bias.copy_from(take_part(whole.k.bias.detach(), of_bias(kv)));
  part.v_proj.bias.copy_from(take_part(whole.v.bias.detach(), of_bias(kv)));
  part.o_proj.bias.copy_from(whole.o.bias.detach());
}

/// Largest difference of the output, dx and the parameters' gradients from one
/// device.
double difference_on(ProcessGroup& tp, std::int64_t groups, double dropout) {
  const int t = tp.size();
  const auto sharers = kv_sharers(tp, groups);
  RankContext::current().random = {};
  const OneDevice whole(groups, dropout);
  GroupedAttention part("a", grouped_shape(groups, dropout), f64_init(), tp,
                        *sharers);
  const Shards own = {{1, tp.rank(), t}}, rows = {{0, tp.rank(), t}};
  const Shards kv = kv_shards(groups, tp.rank(), t);
  take_biases(part, whole, own, kv);
  RankContext::current().random = {};
  const Tensor x = input().set_requires_grad();
  const Tensor y = part(x);
  autograd::backward({y}, {output_gradient()});

  double largest = 0;
  const auto compare = [&](const Tensor& found, const Tensor& expected) {
    largest = larger(largest, max_abs_difference(found, expected));
  };
  compare(y.detach(), whole.y.detach());
  compare(x.grad(), whole.x.grad());
  const auto compare_layer = [&](const Linear& mine, const Linear& all,
                                 const Shards& shards) {
    compare(mine.weight.grad(), take_part(all.weight.grad(), shards));
    compare(mine.bias.grad(), take_part(all.bias.grad(), of_bias(shards)));
  };
  compare_layer(part.q_proj, whole.q, own);
  compare_layer(part.k_proj, whole.k, kv);
  compare_layer(part.v_proj, whole.v, kv);
  compare(part.o_proj.weight.grad(), take_part(whole.o.weight.grad(), rows));
  compare(part.o_proj.bias.grad(), whole.o.bias.grad());
  return largest;
}

class GroupedAttentionRanks : public ::testing::TestWithParam<int> {};

TEST_P(GroupedAttentionRanks, EqualsOneDevice) {
  for (const std::int64_t groups : {1, 2, 4, 8}) {
    for (const double dropout : {0.0, 0.3}) {
      const auto differences = on_ranks(GetParam(), [&](ProcessGroup& tp) {
        return difference_on(tp, groups, dropout);
      });
      for (const double each : differences) {
        EXPECT_LT(each, kAnotherOrder)
            << groups << " groups, dropout " << dropout;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GroupedAttentionRanks,
                         ::testing::Values(1, 2, 4, 8));

TEST(GroupedAttention, OnlySharedKeysSendTheirGradients) {
  const auto log_of_backward = [](int t, std::int64_t groups) {
    return on_ranks(t, [&](ProcessGroup& tp) {
      const auto sharers = kv_sharers(tp, groups);
      GroupedAttention part("a", grouped_shape(groups), f64_init(), tp,
                            *sharers);
      const Tensor x = input().set_requires_grad();
      const Tensor y = part(x);
      tp.clear_records();
      autograd::backward({y}, {output_gradient()});
      std::vector<std::int64_t> sizes;
      for (const CommRecord& record : tp.records()) {
        sizes.push_back(record.numel);
      }
      std::sort(sizes.begin(), sizes.end());
      return sizes;
    })[0];
  };
  const std::int64_t tokens = 2 * 5 * kWidth;
  EXPECT_EQ(log_of_backward(2, 4), std::vector<std::int64_t>{tokens});
  EXPECT_EQ(log_of_backward(4, 4), std::vector<std::int64_t>{tokens});
  EXPECT_EQ(log_of_backward(8, 4),
            (std::vector<std::int64_t>{kHeadDim, kHeadDim, kWidth * kHeadDim,
                                       kWidth * kHeadDim, tokens}));
}

TEST(GroupedAttention, RanksThatShareKeysAreNeighbours) {
  const auto sharers =
      on_ranks(8, [](ProcessGroup& tp) { return kv_sharers(tp, 2)->ranks(); });
  for (int r = 0; r < 8; ++r) {
    EXPECT_EQ(sharers[static_cast<std::size_t>(r)],
              r < 4 ? (std::vector<int>{0, 1, 2, 3})
                    : (std::vector<int>{4, 5, 6, 7}));
  }
  EXPECT_EQ(kv_shards(2, 5, 8), (Shards{{1, 1, 2}}));
  EXPECT_EQ(kv_shards(8, 3, 4), (Shards{{1, 3, 4}}));
}

// [BIT] Shared keys and values are replicas: one gradient for all holders.
TEST(GroupedAttention, RanksThatShareKeysHaveTheSameGradients) {
  const auto gradients = on_ranks(8, [](ProcessGroup& tp) {
    const auto sharers = kv_sharers(tp, 2);
    GroupedAttention part("a", grouped_shape(2), f64_init(), tp, *sharers);
    const Tensor x = input().set_requires_grad();
    autograd::backward({part(x)}, {output_gradient()});
    std::vector<double> values;
    for (const Linear* each : {&part.k_proj, &part.v_proj}) {
      for (const Tensor& grad : {each->weight.grad(), each->bias.grad()}) {
        for (const double v : grad.to_vector<double>()) values.push_back(v);
      }
    }
    return values;
  });
  for (std::size_t r = 0; r < 8; ++r) {
    EXPECT_EQ(gradients[r], gradients[r / 4 * 4]) << r;
  }
  EXPECT_NE(gradients[0], gradients[4]);
}

TEST(GroupedAttention, SizesThatDoNotDivideNameThoseThatWould) {
  const auto error_of = [](int t, std::int64_t heads, std::int64_t groups) {
    return error_on_ranks(t, [&](ProcessGroup& tp) {
      GroupedShape shape = grouped_shape(groups);
      shape.heads = heads;
      const auto sharers = kv_sharers(tp, groups);
      GroupedAttention part("a", shape, f64_init(), tp, *sharers);
    });
  };
  expect_text(error_of(2, 8, 3),
              {"3 groups of keys over 2 ranks; give a multiple or a divisor"});
  expect_text(error_of(1, 8, 3),
              {"3 groups share 8 heads; give a divisor of 8"});
  expect_text(error_of(4, 6, 2),
              {"6 heads do not divide over 4 ranks; give a divisor of 6"});
}

}  // namespace
}  // namespace shardbook::tensor_parallel
