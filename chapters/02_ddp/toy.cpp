// PyTorch's tutorial "Getting Started with DDP": Linear(10, 10) on two ranks,
// which are processes over Gloo and then threads.
//
//   ./shardbook toy ddp
//
//   ddp_model = DDP(nn.Linear(10, 10))
//   loss_fn(ddp_model(torch.randn(20, 10)), labels).backward()
//   optimizer.step()

#include <fmt/format.h>

#include <algorithm>

#include "chapters/02_ddp/ddp.h"
#include "chapters/common/toy.h"
#include "comm/gloo/gloo_group.h"
#include "comm/launch.h"
#include "comm/processes.h"
#include "core/check.h"
#include "core/optim.h"

using namespace shardbook;

struct Samples {
  Tensor inputs, labels;
};

/// Every rank draws its own 20 rows.
Samples samples_of(int rank) {
  toy::Torch torch(1 + static_cast<std::uint32_t>(rank));
  const Tensor inputs = torch.randn({20, 10});
  return {inputs, torch.randn({20, 10})};
}

/// Trains one step, and returns what it prints.
std::string demo_basic(ProcessGroup& world) {
  // 1. The same model on both ranks, wrapped in DDP
  Linear model = toy::Torch(0).linear("fc", 10, 10);
  ddp::DistributedDataParallel ddp_model(model, world);
  const auto optimizer =
      make_optimizer("sgd", model.parameters(), {/*lr=*/0.001});
  // 2. Its own samples; backward averages the gradients
  const Samples own = samples_of(world.rank());
  const Tensor loss = mse_loss(ddp_model(own.inputs), own.labels);
  loss.backward();
  // 3. One device has the rows of both ranks
  const Samples first = samples_of(0), second = samples_of(1);
  Linear one = toy::Torch(0).linear("fc", 10, 10);
  mse_loss(one(concat({first.inputs, second.inputs}, 0)),
           concat({first.labels, second.labels}, 0))
      .backward();
  const double apart =
      std::max(max_abs_difference(model.weight.grad(), one.weight.grad()),
               max_abs_difference(model.bias.grad(), one.bias.grad()));
  SB_CHECK(apart < 1e-6, "the averaged gradient differs by ", apart);
  // 4. The same update on both ranks
  std::string text =
      "averaged gradient of the bias " + toy::values_text(model.bias.grad());
  optimizer->step();
  for (const Tensor& parameter : model.parameters()) {
    const Tensor of_rank_0 = parameter.detach().clone();
    world.broadcast(of_rank_0, 0).wait();
    SB_CHECK(bitwise_equal(of_rank_0, parameter.detach()),
             "rank 0 has other parameters");
  }
  // 5. What both have to say
  const auto losses = world.exchange(fmt::format("{:.6f}", loss.item()));
  return fmt::format(
      "loss of rank 0 {}\nloss of rank 1 {}\n{}\nbias after the update {}\n"
      "the gradient is that of one device with 40 rows; parameters are equal\n",
      losses[0], losses[1], text, toy::values_text(model.bias));
}

int main() {
  // 6. Two processes, then two threads
  std::vector<std::string> by_gloo, by_threads(2);
  if (internal::has_gloo()) by_gloo = run_processes(2, demo_basic);
  run_ranks(2, [&](ProcessGroup& world) {
    by_threads[static_cast<std::size_t>(world.rank())] = demo_basic(world);
  });
  fmt::print("{}", by_threads[0]);
  if (!internal::has_gloo()) {
    fmt::print("threads only: this build lacks Gloo\n");
    return 0;
  }
  const bool is_equal = by_gloo[0] == by_threads[0];
  fmt::print("processes over Gloo {} threads\n",
             is_equal ? "print the same as" : "DIFFER from");
  return is_equal ? 0 : 1;
}
