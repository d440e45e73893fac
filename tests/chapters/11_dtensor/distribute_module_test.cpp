// distribute_module: a module's parameters by a function, its ends by two.

#include <gtest/gtest.h>

#include "chapters/11_dtensor/parallelize.h"
#include "core/layers.h"
#include "core/optim.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

/// Linear 10-32, ReLU, 32-5 without a bias behind the sum.
Sequential make_pair() {
  InitOptions init;
  init.seed = 1;
  init.dtype = DType::kF64;
  Sequential model;
  model.add(Linear("0", 10, 32, init));
  model.add(Relu());
  model.add(Linear("2", 32, 5, init, /*with_bias=*/false));
  return model;
}

Placement columns_then_rows(const std::string& name) {
  return name == "0.weight" ? shard(1) : shard(0);
}
Tensor use_on_every_rank(const Tensor& x, const Mesh& mesh) {
  return from_local(x, mesh, {replicate()}).to_local({partial()});
}
Tensor add_up(const Tensor& y, const Mesh& mesh) {
  return from_local(y, mesh, {partial()}).full_tensor();
}

// 32 columns over 3 ranks are uneven.
TEST(DTensorDistributeModule, EqualsOneDeviceWithTheCallsOfAPair) {
  for (const int t : {1, 2, 3}) {
    const auto logs = on_ranks(t, [t](ProcessGroup& world) {
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      const Mesh tp(devices);
      Sequential plain = make_pair(), model = make_pair();
      const Tensor x = normal({20, 10}, 1), mine = x.clone();
      x.set_requires_grad();
      mine.set_requires_grad();
      const Tensor right = plain(x);
      sum(square(right)).backward();

      const auto cuts = distribute_module(model, tp, columns_then_rows,
                                          use_on_every_rank, add_up);
      world.clear_records();
      const Tensor y = model(mine);
      sum(square(y)).backward();
      const std::string log = log_since(world, 0);
      SB_CHECK(error_between(y, right) < 1e-12, "forward");
      SB_CHECK(error_between(mine.grad(), x.grad()) < 1e-11, "input");
      const auto wholes = plain.named_parameters();
      const auto parts = model.named_parameters();
      for (std::size_t i = 0; i < cuts.size(); ++i) {
        const Block block = local_part(cuts[i].shape, {cuts[i].placement},
                                       tp.shape(), tp.coordinate());
        SB_CHECK(
            error_between(parts[i].tensor.grad(),
                          block_of(wholes[i].tensor.grad(), block)) < 1e-11,
            cuts[i].name);
      }
      return log;
    });
    // The sum of the outputs, and of the gradients of the input
    const std::string both = "all_reduce world 100, all_reduce world 200";
    for (const std::string& log : logs) EXPECT_EQ(log, t == 1 ? "" : both);
  }
}

TEST(DTensorDistributeModule, LeavesReplicasWhereNothingIsSaid) {
  on_ranks(2, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    Sequential plain = make_pair(), model = make_pair();
    const auto cuts = distribute_module(model, Mesh(devices), nullptr);
    for (const CutParameter& cut : cuts) {
      SB_CHECK(cut.placement.is_replicate(), cut.name);
    }
    const Tensor x = normal({4, 10}, 1);
    SB_CHECK(bitwise_equal(model(x), plain(x)), "another result");
    return 0;
  });
}

TEST(DTensorDistributeModule, RefusesAnOptimizerThatCameBefore) {
  const std::string text = error_on_ranks(2, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    Sequential model = make_pair();
    const auto optimizer = make_optimizer("sgd", model.parameters(), {});
    distribute_module(model, Mesh(devices), columns_then_rows);
  });
  EXPECT_TRUE(has_text(text, "create the optimizer after distribute_module"))
      << text;
}

}  // namespace
}  // namespace shardbook::dtensor_test
