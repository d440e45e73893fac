// All pairs of layouts: values bit for bit, and the calls needed.

#include <gtest/gtest.h>

#include "chapters/11_dtensor/redistribute.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"
#include "tests/support/errors.h"

namespace shardbook::dtensor_test {
namespace {

struct Case {
  std::vector<int> mesh;
  Shape shape;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  // Even, uneven, and with empty shards
  for (const int n : {1, 2, 3, 4}) {
    for (const Shape& shape : {Shape{12, 24}, Shape{5, 7}, Shape{1, 2}}) {
      all.push_back({{n}, shape});
    }
  }
  for (const std::vector<int>& mesh :
       {std::vector<int>{2, 2}, std::vector<int>{2, 3}}) {
    for (const Shape& shape : {Shape{7, 5}, Shape{1, 6}}) {
      all.push_back({mesh, shape});
    }
  }
  all.push_back({{8}, {3, 2}});
  all.push_back({{2, 2, 2}, {3, 2}});
  return all;
}

class DTensorRedistribute : public testing::TestWithParam<std::size_t> {
 protected:
  Case param() const { return cases()[GetParam()]; }
};
INSTANTIATE_TEST_SUITE_P(Cases, DTensorRedistribute,
                         testing::Range<std::size_t>(0, cases().size()));

std::vector<Placements> layouts(std::size_t axes) {
  return all_placements({replicate(), shard(0), shard(1), partial()}, axes);
}

struct Pair {
  Placements from, to;
};
// All pairs; on three axes, every 37th.
std::vector<Pair> pairs(const std::vector<Placements>& all_from,
                        const std::vector<Placements>& all_to) {
  std::vector<Pair> some;
  const int step = all_from.at(0).size() < 3 ? 1 : 37;
  int number = 0;
  for (const Placements& from : all_from) {
    for (const Placements& to : all_to) {
      if (number++ % step == 0) some.push_back({from, to});
    }
  }
  return some;
}

std::vector<Pair> pairs(const Mesh& mesh) {
  return pairs(layouts(mesh.ndim()), layouts(mesh.ndim()));
}

// X -> Y has the values of Y, X -> Y -> X has the values of X, and the ledger
// has the table's calls: 16 pairs on one axis, 256 on two.
TEST_P(DTensorRedistribute, EveryPairHasTheValuesAndTheCallsOfTheTable) {
  const auto [mesh_shape, shape] = param();
  const auto wrong =
      on_mesh(mesh_shape, [&](const Mesh& mesh, ProcessGroup& world) {
        const Tensor whole = whole_values(shape);
        std::string wrong;
        for (const auto& [from, to] : pairs(mesh)) {
          const std::string pair = text(from) + " to " + text(to);
          const DTensor x =
              from_local(local_values(shape, from, mesh), mesh, from, shape);
          const std::size_t before = world.records().size();
          const DTensor y = x.redistribute(to);
          const std::string expected = text_of(
              calls_of(from, to, shape, mesh.shape(), mesh.coordinate()), mesh);
          if (log_since(world, before) != expected) {
            wrong += pair + ": " + log_since(world, before) + ", not " +
                     expected + "\n";
          }
          const Block block =
              local_part(shape, to, mesh.shape(), mesh.coordinate());
          if (y.local().shape() != block.shape) wrong += pair + ": shape\n";
          if (to == normalized(to) &&
              !bitwise_equal(y.local(), block_of(whole, block))) {
            wrong += pair + ": block\n";
          }
          if (!bitwise_equal(y.full_tensor(), whole)) wrong += pair + ": Y\n";
          const Placements back = normalized(from);
          if (!bitwise_equal(y.redistribute(back).local(),
                             x.redistribute(back).local())) {
            wrong += pair + ": X to Y to X\n";
          }
        }
        return wrong;
      });
  EXPECT_EQ(joined(wrong), "");
}

// The same for averages, maxima and minima: into R and into shards.
TEST_P(DTensorRedistribute, EveryReductionEqualsItsOperation) {
  const auto [mesh_shape, shape] = param();
  const auto wrong = on_mesh(mesh_shape, [&](const Mesh& mesh, ProcessGroup&) {
    const Tensor whole = whole_values(shape);
    const std::size_t axes = mesh.ndim();
    std::string wrong;
    for (const PartialOp op :
         {PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin}) {
      for (const auto& [from, to] :
           pairs(all_placements({replicate(), shard(0), partial(op)}, axes),
                 all_placements({replicate(), shard(0), shard(1)}, axes))) {
        const DTensor x =
            from_local(local_values(shape, from, mesh), mesh, from, shape);
        const DTensor y = x.redistribute(to);
        const Block block =
            local_part(shape, to, mesh.shape(), mesh.coordinate());
        if (!bitwise_equal(y.local(), block_of(whole, block))) {
          wrong += text(from) + " to " + text(to) + "\n";
        }
      }
    }
    return wrong;
  });
  EXPECT_EQ(joined(wrong), "");
}

// The gradient of the sum of squares is 2 x, for all layouts, and has the
// layout of x with replicas for partials.
TEST_P(DTensorRedistribute, TheGradientComesBackInTheLayoutOfTheInput) {
  const auto [mesh_shape, shape] = param();
  const auto wrong = on_mesh(mesh_shape, [&](const Mesh& mesh, ProcessGroup&) {
    const Tensor twice = scale(whole_values(shape), 2);
    std::string wrong;
    for (const auto& [from, to] : pairs(mesh)) {
      const Tensor leaf = local_values(shape, from, mesh);
      leaf.set_requires_grad();
      const DTensor y = from_local(leaf, mesh, from, shape).redistribute(to);
      // The consumer's gradient is the block of the whole tensor's gradient
      const Tensor local = y.to_local();
      const Block block =
          local_part(shape, normalized(to), mesh.shape(), mesh.coordinate());
      autograd::backward({local}, {block_of(twice, block)});
      const Block mine =
          local_part(shape, normalized(from), mesh.shape(), mesh.coordinate());
      if (!bitwise_equal(leaf.grad(), block_of(twice, mine))) {
        wrong += text(from) + " to " + text(to) + "\n";
      }
    }
    return wrong;
  });
  EXPECT_EQ(joined(wrong), "");
}

/// The calls of a backward whose gradient arrives as `grad`.
std::string backward_log(const Placement& from, const Placement& to,
                         const Placement& grad) {
  return on_mesh({4}, [&](const Mesh& mesh, ProcessGroup& world) {
    const Shape shape{5, 3};
    const Tensor leaf = local_values(shape, {from}, mesh);
    leaf.set_requires_grad();
    const Tensor local = from_local(leaf, mesh, {from}, shape)
                             .redistribute({to})
                             .to_local({grad});
    const std::size_t before = world.records().size();
    autograd::backward({local}, {local_values(shape, {grad}, mesh)});
    const Block mine =
        local_part(shape, normalized({from}), mesh.shape(), mesh.coordinate());
    SB_CHECK(bitwise_equal(leaf.grad(), block_of(whole_values(shape), mine)),
             "the gradient is wrong");
    return log_since(world, before);
  })[0];
}

TEST(DTensorBackward, CallsDependOnTheLayoutOfTheGradient) {
  const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
  // All-reduce has the identity as its backward: Megatron's g
  EXPECT_EQ(backward_log(p, r, r), "");
  // A copy whose gradient is a partial sum: Megatron's f
  EXPECT_EQ(backward_log(r, r, p), "all_reduce world 15");
  // A slice has an all-gather as its backward
  EXPECT_EQ(backward_log(r, s0, s0), "all_gather world 24");
  // An all-gather has a slice as its backward, or a reduce-scatter
  EXPECT_EQ(backward_log(s0, r, r), "");
  EXPECT_EQ(backward_log(s0, r, p), "reduce_scatter world 24");
  // Reduce-scatter and all-gather, all-to-all and its inverse
  EXPECT_EQ(backward_log(p, s0, s0), "all_gather world 24");
  EXPECT_EQ(backward_log(s0, s1, s1), "all_to_all world 8");
  // S -> P has a slice of R as its backward
  EXPECT_EQ(backward_log(s0, p, r), "");
  EXPECT_EQ(backward_log(r, p, r), "");
}

TEST(DTensorRedistributeErrors, NameWhatCannotBe) {
  const auto error = [](const Placements& from, const Placements& to) {
    return error_on_mesh({2}, [&](const Mesh& mesh, ProcessGroup&) {
      from_local(Tensor::zeros({2, 2}), mesh, from).redistribute(to);
    });
  };
  expect_text(error({shard(0)}, {partial(PartialOp::kMax)}),
              {"redistribute S(0) to P(max): zeros are neutral in a sum "
               "only; go by way of R"});
  expect_text(error({replicate()}, {shard(2)}),
              {"redistribute: S(2) of a tensor [2, 2]; shard a dim from "
               "0 to 1"});
  expect_text(error({replicate()}, {shard(0), shard(0)}),
              {"(S(0), S(0)) are 2 placements for a mesh of 1 axes"});
}

}  // namespace
}  // namespace shardbook::dtensor_test
