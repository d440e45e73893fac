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
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/options.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"

using namespace shardbook;

/// The number of micro-batches, not their size: two rows each.
constexpr int kChunks = 8, kRows = 16 / kChunks;

/// Micro-batch b is rows 2b and 2b + 1. The loss is the mean square.
struct Feed : pipeline::Feed {
  explicit Feed(const Tensor& all) : rows(all) {}
  pipeline::Piece piece(int b) const override {
    return {0, {b * kRows, 1}, kRows, 1.0 / kChunks};
  }
  Tensors inputs(int b) override {
    const Tensor piece = Tensor::empty({kRows, 16});  // on this rank's device
    piece.copy_from(rows.rows_view(b * kRows, (b + 1) * kRows));
    return {piece};
  }
  Tensor loss(int b, const Tensors& outputs) override {
    seen[static_cast<std::size_t>(b)] = outputs[0].detach().clone();
    return mean(square(outputs[0]));
  }
  Tensors example(std::int64_t n) const override {
    return {Tensor::empty({n, 16}, {DType::kF32, Device::meta()})};
  }
  DType dtype() const override { return DType::kF32; }
  Tensor rows;
  Tensors seen = Tensors(kChunks);
};

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
  std::vector<NamedTensor> by_rank[2];
  Tensors outputs;
  run_ranks(2, [&](ProcessGroup& world) {
    // 3. Each rank has its layer, and runs its list of the schedule
    PipelineModel model(Options(), net.layers(), one_stage_per_rank({0, 1, 2}),
                        world);
    Feed feed(input);
    pipeline::Engine engine(schedule, model, world, feed, nullptr,
                            {pipeline::Recompute::kExceptLast});
    engine.run();
    by_rank[world.rank()] = model.named_state();
    if (world.rank() == 1) outputs = feed.seen;
  });
  // 4. The same output and gradients as on one device
  const Tensor output = concat(outputs, 0), one = net(input);
  mean(square(one)).backward();
  Tensors found = {output}, expected = {one};
  for (const std::vector<NamedTensor>& parameters : by_rank) {
    for (const auto& [name, each] : parameters) {
      fmt::print("{} {} on {}\n", name, shape_text(each.shape()),
                 each.device().name());
      found.push_back(each.grad());
    }
  }
  for (const Tensor& each : net.parameters()) expected.push_back(each.grad());
  fmt::print("output of each micro-batch {}, of all {}\n",
             shape_text(outputs[0].shape()), shape_text(output.shape()));
  fmt::print("output {}\n", toy::values_text(output));
  fmt::print("loss {:.6f}\n", mean(square(output)).item());
  return toy::compare(found, expected);
}
