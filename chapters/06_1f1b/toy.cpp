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
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/options.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"

using namespace shardbook;

constexpr int kMicroBatches = 8, kRows = 16 / kMicroBatches;

/// Micro-batch j is rows 2j and 2j + 1. The targets are zeros.
struct Feed : pipeline::Feed {
  explicit Feed(const Tensor& all) : rows(all) {}
  pipeline::Piece piece(int j) const override {
    return {0, {j * kRows, 1}, kRows, 1.0 / kMicroBatches};
  }
  Tensors inputs(int j) override {
    const Tensor piece = Tensor::empty({kRows, 16});  // on this rank's device
    piece.copy_from(rows.rows_view(j * kRows, (j + 1) * kRows));
    return {piece};
  }
  Tensor loss(int j, const Tensors& outputs) override {
    const Tensor loss = mean(square(outputs[0]));
    losses[static_cast<std::size_t>(j)] = loss.detach().clone();
    return loss;
  }
  Tensors example(std::int64_t n) const override {
    return {Tensor::empty({n, 16}, {DType::kF32, Device::meta()})};
  }
  DType dtype() const override { return DType::kF32; }
  Tensor rows;
  Tensors losses = Tensors(kMicroBatches);
};

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
  std::vector<NamedTensor> by_rank[2];
  Tensors losses;
  int most_sets[2] = {0, 0};
  run_ranks(2, [&](ProcessGroup& world) {
    // 3. Each rank has its layer, and runs its list of the schedule
    PipelineModel model(Options(), net.layers(), one_stage_per_rank({0, 1, 2}),
                        world);
    Feed feed(input);
    pipeline::Engine engine(schedule, model, world, feed);
    engine.run();
    by_rank[world.rank()] = model.named_state();
    most_sets[world.rank()] = engine.max_live();
    if (world.rank() == 1) losses = feed.losses;
  });
  // 4. The same loss and gradients as on one device
  const Tensor one = mean(square(net(input)));
  one.backward();
  double sum = 0;
  for (const Tensor& each : losses) sum += each.item();
  fmt::print("sets of activations {} on rank 0, {} on rank 1\n", most_sets[0],
             most_sets[1]);
  fmt::print("losses");
  for (const Tensor& each : losses) fmt::print(" {:.6f}", each.item());
  fmt::print("\nloss {:.6f}\n", sum / kMicroBatches);
  Tensors found = {Tensor::full({}, sum / kMicroBatches)}, expected = {one};
  for (const std::vector<NamedTensor>& parameters : by_rank) {
    for (const auto& [name, each] : parameters) found.push_back(each.grad());
  }
  fmt::print("gradient of fc1's bias {}\n", toy::values_text(found[2]));
  for (const Tensor& each : net.parameters()) expected.push_back(each.grad());
  return toy::compare(found, expected);
}
