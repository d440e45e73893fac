// Entering and leaving: distribute_tensor, from_local, to_local, full_tensor.

#include "chapters/11_dtensor/dtensor.h"

#include <gtest/gtest.h>

#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

// Every rank passes other values; coordinate 0's are used. Where an axis leaves
// ranks without rows, the next axes cut nothing, as in PyTorch: of [1, 6, 4] as
// (S(0), S(2)), the second row of a 2 x 2 mesh has [0, 6, 2].
TEST(DTensorDistribute, TheRankAtCoordinateZeroDecides) {
  const std::vector<std::pair<std::vector<int>, Shape>> cases = {
      {{3}, {7, 5}},      {{8}, {5, 2}},       {{2, 2}, {7, 5}},
      {{2, 3}, {7, 5}},   {{2, 2}, {1, 6, 4}}, {{3, 2}, {2, 6}},
      {{2, 1, 2}, {1, 3}}};
  for (const auto& [mesh_shape, global] : cases) {
    const Shape& shape = global;
    Placements choices = {replicate(), partial()};
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      choices.push_back(shard(static_cast<std::int64_t>(dim)));
    }
    const auto wrong =
        on_mesh(mesh_shape, [&](const Mesh& mesh, ProcessGroup& world) {
          const Tensor truth = whole_values(shape);
          const Tensor mine = add_scalar(truth, world.rank());
          std::string wrong;
          for (const Placements& placements :
               all_placements(choices, mesh.ndim())) {
            const DTensor x = distribute_tensor(mine, mesh, placements);
            const Block block =
                local_part(shape, placements, mesh.shape(), mesh.coordinate());
            if (x.local().shape() != block.shape ||
                !bitwise_equal(x.full_tensor(), truth)) {
              wrong += text(placements) + "\n";
            }
          }
          return wrong;
        });
    EXPECT_EQ(joined(wrong), "") << shape_text(shape);
  }
}

TEST(DTensorDistribute, ScattersOrBroadcastsAxisByAxis) {
  const auto log = on_mesh({2, 3}, [](const Mesh& mesh, ProcessGroup& world) {
    distribute_tensor(whole_values({7, 5}), mesh, {shard(0), shard(1)});
    distribute_tensor(whole_values({7, 5}), mesh, {replicate(), shard(0)});
    return log_since(world, 0);
  });
  // [7, 5] over 2 rows of ranks: 8 * 5. Rank 0 keeps 4 rows, of which each
  // column of ranks gets 2 columns: 4 * 6; rank 5 has 3 rows.
  EXPECT_EQ(log[0],
            "scatter axis0 40, scatter axis1 24, broadcast axis0 35, "
            "scatter axis1 45");
  EXPECT_EQ(log[5],
            "scatter axis0 40, scatter axis1 18, broadcast axis0 35, "
            "scatter axis1 45");
}

TEST(DTensorDistribute, EqualTensorsAreCutWithoutCalls) {
  on_mesh({2, 2}, [](const Mesh& mesh, ProcessGroup& world) {
    const Tensor whole = whole_values({7, 5});
    const DTensor x = cut_tensor(whole, mesh, {shard(1), shard(0)});
    SB_CHECK(world.records().empty(), "a call was made");
    SB_CHECK(bitwise_equal(x.full_tensor(), whole), "other values");
  });
}

// A submesh leaves the other axis alone; a mesh in another order of axes cuts
// in that order.
TEST(DTensorMesh, AxesAreChosenByNameAndOrder) {
  on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"dp", "tp"}, {2, 2}));
    const Tensor whole = whole_values({8});
    const Mesh tp(devices, {"tp"});
    const DTensor half = cut_tensor(whole, tp, {shard(0)});
    const std::int64_t column = world.rank() % 2;
    SB_CHECK(half.local().shape() == Shape{4}, "half of it");
    SB_CHECK(half.local().to_vector<double>()[0] == value_at(4 * column),
             "by tp alone");

    const Mesh nested(devices, {"tp", "dp"});
    const DTensor quarter = cut_tensor(whole, nested, {shard(0), shard(0)});
    const std::int64_t row = world.rank() / 2;
    SB_CHECK(quarter.local().to_vector<double>()[0] ==
                 value_at(4 * column + 2 * row),
             "tp cuts first");
    // Opening the inner cut alone gives tp's part
    const DTensor opened = quarter.redistribute({shard(0), replicate()});
    SB_CHECK(bitwise_equal(opened.local(), half.local()), "dp is inside");
    SB_CHECK(log_since(world, 0) == "all_gather dp 4", "one all-gather");
    return 0;
  });
}

TEST(DTensorFromLocal, RunCheckFindsReplicasThatDiffer) {
  const auto make = [](double difference, bool run_check) {
    return error_on_mesh({2, 2}, [=](const Mesh& mesh, ProcessGroup& world) {
      const Tensor local =
          Tensor::full({3}, world.rank() == 3 ? difference : 0.0);
      from_local(local, mesh, {replicate(), replicate()}, std::nullopt,
                 run_check);
      SB_CHECK(log_since(world, 0) ==
                   (run_check ? "broadcast axis0 3, broadcast axis1 3" : ""),
               log_since(world, 0));
    });
  };
  EXPECT_EQ(make(0, true), "");
  EXPECT_EQ(make(1, false), "");
  expect_text(make(1, true),
              {"R on axis 'axis0', and coordinate 1 has other values "
               "than coordinate 0"});
}

TEST(DTensorFromLocal, UnevenShardsNeedTheGlobalShape) {
  const auto make = [](bool with_shape, bool run_check) {
    return error_on_mesh({2}, [=](const Mesh& mesh, ProcessGroup& world) {
      const Tensor local = Tensor::zeros({world.rank() == 0 ? 3 : 2, 4});
      from_local(local, mesh, {shard(0)},
                 with_shape ? std::optional<Shape>({5, 4}) : std::nullopt,
                 run_check);
    });
  };
  EXPECT_EQ(make(true, true), "");
  expect_text(make(false, true),
              {"S(0) on axis 'axis0' is [3, 4] at coordinate 0 and "
               "[2, 4] at coordinate 1; give the global shape"});
  const std::string wrong =
      error_on_mesh({2}, [](const Mesh& mesh, ProcessGroup&) {
        from_local(Tensor::zeros({3, 4}), mesh, {shard(0)}, Shape{5, 4});
      });
  expect_text(wrong, {"(S(0)) of [5, 4] is [2, 4] on this rank, and the "
                      "array is [3, 4]"});
}

// Without grad_placements a replica's gradient counts as a replica; with P it
// is summed.
TEST(DTensorToLocal, GradPlacementsSayWhatTheGradientIs) {
  const auto gradient = [](const Placements& grad_placements) {
    return on_mesh({3}, [&](const Mesh& mesh, ProcessGroup& world) {
      const Tensor leaf = whole_values({2});
      leaf.set_requires_grad();
      const Tensor local =
          from_local(leaf, mesh, {replicate()}).to_local(grad_placements);
      const double mine = 1 + world.rank();
      autograd::backward({local}, {Tensor::full({2}, mine, leaf.options())});
      return leaf.grad().to_vector<double>();
    });
  };
  const auto replica = gradient({replicate()});
  const auto term = gradient({partial()});
  const auto average = gradient({partial(PartialOp::kAvg)});
  for (int rank = 0; rank < 3; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_EQ(replica[r], std::vector<double>(2, 1.0 + rank));
    EXPECT_EQ(term[r], std::vector<double>(2, 6.0));
    EXPECT_NEAR(average[r][0], 2.0, 1e-15);
  }
  const std::string wrong = error_on_mesh({2}, [](const Mesh& mesh,
                                                  ProcessGroup&) {
    from_local(Tensor::zeros({4}), mesh, {replicate()}).to_local({shard(0)});
  });
  expect_text(wrong, {"the gradient of a replica is R or P"});
}

// Two uses of one tensor: one gradient is a replica, the other a partial sum.
// The total is right in both orders.
TEST(DTensorGradient, ReplicasAndTermsMeet) {
  for (const bool term_first : {false, true}) {
    const auto grads = on_mesh({2}, [&](const Mesh& mesh, ProcessGroup& world) {
      const Tensor leaf = whole_values({3});
      leaf.set_requires_grad();
      const DTensor x = from_local(leaf, mesh, {replicate()});
      // Backward visits the later use first
      const Tensor a = x.to_local({term_first ? replicate() : partial()});
      const Tensor b = x.to_local({term_first ? partial() : replicate()});
      const Tensor& term = term_first ? b : a;
      const Tensor& replica = term_first ? a : b;
      const Tensor loss = add(scale(sum(term), world.rank() == 0 ? 3.0 : 4.0),
                              scale(sum(replica), 10.0));
      loss.backward();
      return leaf.grad().to_vector<double>();
    });
    EXPECT_EQ(grads[0], std::vector<double>(3, 17.0)) << term_first;
    EXPECT_EQ(grads[1], std::vector<double>(3, 17.0)) << term_first;
  }
}

TEST(DTensorParameter, KeepsItsBlockAndItsLayout) {
  on_mesh({2}, [](const Mesh& mesh, ProcessGroup& world) {
    const Parameter weight =
        dtensor::make_parameter(whole_values({5, 2}), mesh, {shard(0)});
    SB_CHECK(weight.local.is_leaf() && weight.local.requires_grad(), "leaf");
    SB_CHECK(weight.local.size(0) == (world.rank() == 0 ? 3 : 2), "size");
    const Tensor local =
        weight().redistribute({replicate()}).to_local({partial()});
    autograd::backward(
        {local}, {Tensor::full({5, 2}, 1 + world.rank(), local.options())});
    SB_CHECK(weight.local.grad().shape() == weight.local.shape(), "shape");
    SB_CHECK(weight.local.grad().to_vector<double>()[0] == 3, "1 + 2");
  });
  const std::string wrong =
      error_on_mesh({2}, [](const Mesh& mesh, ProcessGroup&) {
        dtensor::make_parameter(Tensor::zeros({4}), mesh, {partial()});
      });
  expect_text(wrong, {"terms of a sum cannot be trained"});
}

}  // namespace
}  // namespace shardbook::dtensor_test
