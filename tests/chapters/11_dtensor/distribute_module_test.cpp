// distribute_module: one function for parameters, two for inputs and outputs.

#include <gtest/gtest.h>

#include "core/optim.h"
#include "tests/chapters/11_dtensor/parallelize_support.h"

namespace shardbook::dtensor_test {
namespace {

/// Linear 10-32, ReLU, 32-5; without a bias after the sum.
Sequential make_pair() {
  Sequential model;
  model.add(Linear("0", 10, 32, f64_init()));
  model.add(Relu());
  model.add(Linear("2", 32, 5, f64_init(), /*with_bias=*/false));
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
    const auto logs = on_tp(t, [](const Mesh& tp, ProcessGroup& world) {
      const auto cut = [&](Module& model) {
        return distribute_module(model, tp, columns_then_rows,
                                 use_on_every_rank, add_up);
      };
      return calls_of_equal_steps(make_pair, noise({20, 10}, 1), cut, tp,
                                  world);
    });
    // The sum of the outputs, and of the gradients of the input
    const std::string both = "all_reduce world 100, all_reduce world 200";
    for (const std::string& log : logs) EXPECT_EQ(log, t == 1 ? "" : both);
  }
}

TEST(DTensorDistributeModule, LeavesReplicasWhereNothingIsSaid) {
  on_tp(2, [](const Mesh& tp, ProcessGroup&) {
    Sequential plain = make_pair(), model = make_pair();
    const auto cuts = distribute_module(model, tp, nullptr);
    for (const CutParameter& cut : cuts) {
      SB_CHECK(cut.placement.is_replicate(), cut.name);
    }
    const Tensor x = noise({4, 10}, 1);
    SB_CHECK(bitwise_equal(model(x), plain(x)), "another result");
  });
}

TEST(DTensorDistributeModule, RefusesAnOptimizerThatCameBefore) {
  const std::string text = error_on_tp(2, [](const Mesh& tp, ProcessGroup&) {
    Sequential model = make_pair();
    const auto optimizer = make_optimizer("sgd", model.parameters(), {});
    distribute_module(model, tp, columns_then_rows);
  });
  expect_text(text, {"create the optimizer after distribute_module"});
}

}  // namespace
}  // namespace shardbook::dtensor_test
