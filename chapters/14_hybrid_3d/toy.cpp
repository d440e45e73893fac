// The documents' hybrids: data parallelism with pipelines on 4 GPUs, also with
// tensor parallelism on 8, and the same with ZeRO.
//
//   ./shardbook toy hybrid_3d

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "chapters/07_tensor_parallel/parallel_state.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/lesson.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"

using namespace shardbook;

/// Draws stages from top to bottom and replicas side by side. Ranks that share
/// layers are joined by a plus.
void draw(DeviceMesh& mesh) {
  const int stage = mesh.coordinate("pp"), replica = mesh.coordinate("dp");
  std::string text;
  if (mesh.coordinate("tp") == 0) {
    const std::string gpus =
        fmt::format("GPU {}", fmt::join(mesh.group("tp").ranks(), "+"));
    text = replica == 0 ? fmt::format("  stage {}  {:10}", stage, gpus)
                        : gpus + "\n";
  }
  toy::print_in_order(mesh.world(), text);
  for (const std::string axis : {"dp", "pp", "tp"}) {
    const std::string text = toy::groups_text(mesh.world(), &mesh.group(axis));
    if (mesh.world().rank() == 0 && mesh.size(axis) > 1) {
      fmt::print("  {} groups {}\n", axis, text);
    }
  }
}

/// Trains on `ranks` GPUs in two replicas of two stages; returns whether the
/// weights are those of one device.
bool compare(const std::string& title, int ranks, int zero_stage) {
  // 1. A GPT of four blocks and a tied table, Adam
  Options options = lesson::options();
  options.world_size = ranks;
  options.optimizer = "adamw";
  options.optimizer_options.lr = 1e-3;
  // 2. Two stages and two replicas; the ranks that are left share layers
  hybrid::HybridOptions setup;
  setup.pp = 2;
  setup.tp = ranks / 4;
  setup.micro_batches = 3;
  setup.zero_stage = zero_stage;
  hybrid::check_legal(options, setup);
  const ReferenceRun one_device = hybrid::reference_run(options, setup);
  double difference = 0;
  run_ranks(ranks, [&](ProcessGroup& world) {
    // 3. The groups: tensor-parallel ranks are neighbours, then replicas, then
    // stages
    tensor_parallel::ModelParallel groups(world, hybrid::topology_of(setup));
    if (world.rank() == 0) fmt::print("{}\n", title);
    draw(groups.mesh());
    // 4. Ten steps
    const auto strategy = hybrid::make_strategy(options, setup, groups.mesh());
    const TrainingLog log =
        train(options, strategy->optimizer(), world.rank() == 0,
              [&](std::int64_t step) { return strategy->step(step); });
    // 5. All weights, the loss and a rank's optimizer state
    for (const NamedTensor& each : strategy->full_state()) {
      for (const NamedTensor& other : one_device.parameters) {
        if (each.name != other.name) continue;
        difference =
            std::max(difference, max_abs_difference(each.tensor, other.tensor));
      }
    }
    if (world.rank() != 0) return;
    fmt::print("  loss {:.6f}, one device {:.6f}; optimizer state {} bytes\n",
               log.losses.back(), one_device.losses.back(),
               RankContext::current().device.memory().current(
                   MemoryKind::kOptimizerState));
  });
  return difference < 1e-9;
}

int main() {
  const bool two = compare("DP x PP on 4 GPUs", 4, /*zero_stage=*/0);
  const bool three = compare("DP x PP x TP on 8 GPUs", 8, /*zero_stage=*/0);
  const bool zero = compare("ZeRO-DP x PP x TP on 8 GPUs", 8, /*zero_stage=*/1);
  return two && three && zero ? 0 : 1;
}
