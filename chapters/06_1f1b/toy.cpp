// The example of torch.distributed.pipelining with Schedule1F1B: fc1 on one
// rank, fc2 on the other, and 16 rows in 8 micro-batches.
//
//   ./shardbook toy 1f1b
//
//   layers = [nn.Linear(16, 8), nn.Linear(8, 4)]
//   stage = PipelineStage(layers[rank], rank, 2, device)
//   schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=mse)
//   schedule.step(x)                               # rank 0
//   schedule.step(target=zeros, losses=losses)     # rank 1

#include <fmt/format.h>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/toy.h"

using namespace shardbook;

constexpr int kMicroBatches = 8;  // of two rows each

int main() {
  // 1. fc1 and fc2, and the input, from the seed of the original
  toy::Torch torch(0);
  toy::Net net;
  net.add("fc1", torch.linear("fc1", 16, 8));
  net.add("fc2", torch.linear("fc2", 8, 4));
  const Tensor input = torch.rand({16, 16});
  // 2. One forward and one backward in turn
  const pipeline::Schedule schedule =
      pipeline::schedules::one_f_one_b(2, kMicroBatches);
  fmt::print("{}", draw(schedule, replay(schedule)));
  // 3. Each rank has its layer, and runs its list of the schedule
  const toy::PipelineRun run = toy::run_pipeline(net, input, schedule);
  // 4. The same loss and gradients as on one device
  const Tensor one = mean(square(net(input)));
  one.backward();
  double sum = 0;
  fmt::print("sets of activations {} on rank 0, {} on rank 1\nlosses",
             run.most_sets[0], run.most_sets[1]);
  for (const Tensor& output : run.outputs) {
    const double loss = mean(square(output)).item();
    fmt::print(" {:.6f}", loss);
    sum += loss;
  }
  fmt::print("\nloss {:.6f}\n", sum / kMicroBatches);
  Tensors found = {Tensor::full({}, sum / kMicroBatches)}, expected = {one};
  for (const auto& [name, each] : run.parameters) found.push_back(each.grad());
  fmt::print("gradient of fc1's bias {}\n", toy::values_text(found[2]));
  for (const Tensor& each : net.parameters()) expected.push_back(each.grad());
  return toy::compare(found, expected);
}
