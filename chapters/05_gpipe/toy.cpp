// The example of torch.distributed.pipeline.sync.Pipe: fc1 on one device, fc2
// on the other, and 16 rows in 8 micro-batches.
//
//   ./shardbook toy gpipe
//
//   fc1 = nn.Linear(16, 8).cuda(0)
//   fc2 = nn.Linear(8, 4).cuda(1)
//   model = Pipe(nn.Sequential(fc1, fc2), chunks=8)
//   output_rref = model(torch.rand(16, 16).cuda(0))

#include <fmt/format.h>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/toy.h"

using namespace shardbook;

/// The number of micro-batches, not their size: two rows each.
constexpr int kChunks = 8, kRows = 16 / kChunks;

int main() {
  // 1. fc1 and fc2, and the input, from the seed of the original
  toy::Torch torch(0);
  toy::Net net;
  net.add("fc1", torch.linear("fc1", 16, 8));
  net.add("fc2", torch.linear("fc2", 8, 4));
  const Tensor input = torch.rand({16, 16});
  // 2. The way of the micro-batches
  const pipeline::Schedule schedule = gpipe::schedule(2, kChunks);
  fmt::print("{} micro-batches of {} rows, on {} ranks\n{}", kChunks, kRows,
             schedule.num_ranks, draw(schedule, replay(schedule)));
  // 3. Each rank has its layer, and runs its list of the schedule
  const toy::PipelineRun run = toy::run_pipeline(
      net, input, schedule, {pipeline::Recompute::kExceptLast});
  // 4. The same output and gradients as on one device
  const Tensor output = concat(run.outputs, 0), one = net(input);
  mean(square(one)).backward();
  Tensors found = {output}, expected = {one};
  for (const auto& [name, each] : run.parameters) {
    fmt::print("{} {} on {}\n", name, shape_text(each.shape()),
               each.device().name());
    found.push_back(each.grad());
  }
  for (const Tensor& each : net.parameters()) expected.push_back(each.grad());
  fmt::print("output of each micro-batch {}, of all {}\n",
             shape_text(run.outputs[0].shape()), shape_text(output.shape()));
  fmt::print("output {}\n", toy::values_text(output));
  fmt::print("loss {:.6f}\n", mean(square(output)).item());
  return toy::compare(found, expected);
}
