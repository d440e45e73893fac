// Layers of GPT are replaced through the factory: a Linear whose columns lie on
// two ranks computes what the whole one does, and begins with its weights.

#include <gtest/gtest.h>

#include "chapters/common/models/models.h"
#include "comm/launch.h"
#include "core/autograd.h"

namespace shardbook {
namespace {

/// This rank's columns of a Linear; the outputs are gathered.
class ColumnLinear : public ModuleOf<ColumnLinear> {
 public:
  ColumnLinear(const std::string& name, std::int64_t in, std::int64_t out,
               double stddev, InitOptions init, ProcessGroup& tp)
      : tp_(&tp) {
    init.shard = {1, tp.rank(), tp.size()};
    weight = make_parameter(name + ".weight", {in, out}, stddev, init);
    init.shard.dim = 0;
    bias = make_constant_parameter({out}, 0, init);
  }
  Tensor forward(const Tensor& x) override {
    const Tensor own = reshape(linear(x, weight, bias), {-1, weight.size(1)});
    Tensor all =
        Tensor::empty({tp_->size() * own.size(0), own.size(1)}, own.options());
    tp_->all_gather(all, own).wait();
    Shape shape = x.shape();
    shape.back() = tp_->size() * weight.size(1);
    // [ranks, rows, columns] -> [rows, ranks, columns]
    return reshape(
        transpose(reshape(all, {tp_->size(), own.size(0), own.size(1)}), 0, 1),
        shape);
  }
  void members(MemberVisitor& visit) override {
    visit.parameter("weight", weight);
    visit.parameter("bias", bias);
  }

  Tensor weight, bias;

 private:
  ProcessGroup* tp_;
};

ModelConfig two_layers() {
  ModelConfig config;
  config.n_layer = 2;
  return config;
}

TEST(LayerFactory, ALinearOverTwoRanksBeginsAsOnOneDevice) {
  const ModelConfig config = two_layers();
  InitOptions init;
  init.seed = 5;
  run_ranks(2, [&](ProcessGroup& tp) {
    const NoGrad no_grad;
    Gpt whole(config, init);
    LayerFactory layers;
    layers.linear = [&](const std::string& name, std::int64_t in,
                        std::int64_t out, double stddev,
                        const InitOptions& init) -> AnyModule {
      return {std::make_unique<ColumnLinear>(name, in, out, stddev, init, tp)};
    };
    Gpt sharded(config, init, layers);

    // Under the same names, and bit for bit
    const auto mine = sharded.named_parameters();
    const auto theirs = whole.named_parameters();
    ASSERT_EQ(mine.size(), theirs.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].name, theirs[i].name);
      const Tensor& part = mine[i].tensor;
      Tensor expected = theirs[i].tensor;
      if (part.shape() != expected.shape()) {
        const std::int64_t dim = part.ndim() - 1, own = part.size(-1);
        expected = slice(expected, dim, tp.rank() * own, (tp.rank() + 1) * own);
      }
      EXPECT_TRUE(bitwise_equal(part, expected)) << mine[i].name;
    }

    Tensor tokens = Tensor::empty({2, 8}, {DType::kI64, Device()});
    for (std::int64_t i = 0; i < 16; ++i) {
      tokens.data<std::int64_t>()[i] = 7 * i % config.vocab_size;
    }
    EXPECT_LT(max_abs_difference(sharded(tokens), whole(tokens)), 1e-5);
  });
}

// Queries, keys and values are three blocks, each of which is cut.
TEST(LayerFactory, AShardOfThreeBlocksTakesAPartOfEach) {
  InitOptions init;
  const Tensor whole = make_parameter("w", {4, 12}, 1, init);
  for (int index = 0; index < 2; ++index) {
    InitOptions part_init;
    part_init.shard = {1, index, 2, 3};
    const Tensor part = make_parameter("w", {4, 12}, 1, part_init);
    ASSERT_EQ(part.shape(), (Shape{4, 6}));
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t block = 0; block < 3; ++block) {
        for (std::int64_t i = 0; i < 2; ++i) {
          EXPECT_EQ(part.data<float>()[row * 6 + block * 2 + i],
                    whole.data<float>()[row * 12 + block * 4 + index * 2 + i]);
        }
      }
    }
  }
  InitOptions odd;
  odd.shard = {1, 0, 5};
  EXPECT_THROW(make_parameter("w", {4, 12}, 1, odd), Error);
}

}  // namespace
}  // namespace shardbook
