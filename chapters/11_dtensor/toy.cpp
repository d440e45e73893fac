// PyTorch's example of tensor parallelism by DTensor: two linear layers on a
// mesh of four ranks, once pairwise and once in sequence parallelism.
//
//   ./shardbook toy dtensor
//
//   model = parallelize_module(ToyModel(), device_mesh, PairwiseParallel())
//   optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
//   model(torch.rand(20, 10)).sum().backward()

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <vector>

#include "chapters/11_dtensor/parallelize.h"
#include "chapters/common/toy.h"
#include "core/optim.h"

using namespace shardbook;

/// Linear 10 -> 32, ReLU, Linear 32 -> 5.
toy::Net make_toy_model() {
  toy::Torch torch(0);
  toy::Net model;
  model.add("net1", torch.linear("net1", 10, 32));
  model.add("relu", Relu());
  model.add("net2", torch.linear("net2", 32, 5));
  return model;
}

/// Trains three steps on 20 rows of each seed; returns the sums of all outputs.
std::vector<double> train(Module& model, std::vector<toy::Torch> seeds) {
  // After parallelize_module, which replaces the parameters
  const auto optimizer =
      make_optimizer("sgd", model.parameters(), {/*lr=*/0.25});
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    Tensors rows;
    for (toy::Torch& seed : seeds) rows.push_back(seed.rand({20, 10}));
    const Tensor loss = sum(model(concat(rows, 0)));
    loss.backward();
    optimizer->step();
    model.clear_grad();
    losses.push_back(loss.item());
  }
  return losses;
}

/// Returns whether the losses are those of one device.
bool compare(ProcessGroup& world, bool is_sequence) {
  // 1. A mesh of all ranks, and a style for the whole model
  DeviceMesh devices(world, Topology({"tp"}, {world.size()}));
  toy::Net model = make_toy_model(), whole = make_toy_model();
  const auto cuts = parallelize_module(
      model, dtensor::Mesh(devices),
      {{"", is_sequence ? dtensor::pairwise_sequence() : dtensor::pairwise()}});
  // 2. Parameters were whole on every rank, and now lie in blocks
  std::string lines = is_sequence ? "sequence parallel\n" : "pairwise\n";
  const auto blocks = model.named_parameters();
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    lines += fmt::format("{} {}: R -> {}, {} on each rank\n", cuts[i].name,
                         shape_text(cuts[i].shape), text(cuts[i].placement),
                         shape_text(blocks[i].tensor.shape()));
  }
  // 3. Pairwise, ranks read the same rows; else their own slices of one batch
  std::vector<toy::Torch> seeds = {toy::Torch(1)};
  for (int seed = 2; is_sequence && seed <= 4; ++seed) seeds.emplace_back(seed);
  const int own = is_sequence ? world.rank() : 0;
  const Tensor sums = Tensor::from_values(train(model, {seeds[own]}), {3});
  if (is_sequence) world.all_reduce(sums).wait();
  // 4. One device reads the rows of all ranks
  const auto losses = sums.to_vector<double>();
  const auto one_device = train(whole, seeds);
  bool equal = true;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    equal = equal && std::abs(losses[i] / one_device[i] - 1) < 1e-5;
  }
  if (world.rank() == 0) {
    fmt::print("{}losses     {:.6e}\none device {:.6e}: {}\n", lines,
               fmt::join(losses, " "), fmt::join(one_device, " "),
               equal ? "equal" : "DIFFERENT");
  }
  return equal;
}

int main() {
  return toy::run(4, [](ProcessGroup& world) {
    const bool pairwise = compare(world, /*is_sequence=*/false);
    return compare(world, /*is_sequence=*/true) && pairwise;
  });
}
