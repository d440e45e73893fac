// Checkpoints move freely: a checkpoint of one way to cut layers is loaded by
// every other one, on another number of ranks, bit for bit.

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/11_dtensor/dtensor_strategy.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using MakeStrategy = std::function<std::unique_ptr<Strategy>(
    const Options& options, ProcessGroup& world, DeviceMesh& mesh)>;

struct Way {
  std::string name;
  int world_size;
  Topology topology;
  MakeStrategy make;
};

/// `StrategyType(options, setup, world)`.
template <typename StrategyType, typename Setup>
MakeStrategy on_world(const Setup& setup) {
  return [setup](const Options& options, ProcessGroup& world, DeviceMesh&) {
    return std::make_unique<StrategyType>(options, setup, world);
  };
}

std::vector<Way> all_ways() {
  const MakeStrategy on_grid = [](const Options& options, ProcessGroup& world,
                                  DeviceMesh& mesh) {
    return std::make_unique<summa::SummaStrategy>(options, summa::grid_of(mesh),
                                                  world);
  };
  const auto one_dimension = on_world<tensor_parallel::TensorParallelStrategy>(
      tensor_parallel::StrategyOptions{});
  const auto over_tokens = [](sequence_parallel::Kind kind) {
    sequence_parallel::StrategyOptions setup;
    setup.sequence.kind = kind;
    return on_world<sequence_parallel::SequenceStrategy>(setup);
  };
  dtensor::StrategyOptions mesh_2x2;
  mesh_2x2.mesh = "2x2";
  const auto hybrid_way = [](const std::string& name, int tp, int pp,
                             int zero_stage) {
    hybrid::HybridOptions setup;
    setup.dp = setup.micro_batches = 2;
    setup.tp = tp, setup.pp = pp, setup.zero_stage = zero_stage;
    return Way{
        name, 2 * tp * pp, hybrid::topology_of(setup),
        [setup](const Options& options, ProcessGroup&, DeviceMesh& mesh) {
          return hybrid::make_strategy(options, setup, mesh);
        }};
  };
  return {
      {"1D on 3", 3, Topology({"tp"}, {3}), one_dimension},
      {"1D on 8", 8, Topology({"tp"}, {8}), one_dimension},
      {"2D", 4, summa::square(2), on_grid},
      {"2.5D", 8, Topology({"dep", "col", "row"}, {2, 2, 2}), on_grid},
      {"3D", 8, cube::cube_of(2),
       [](const Options& options, ProcessGroup& world, DeviceMesh& mesh) {
         return std::make_unique<cube::CubeStrategy>(
             options, cube::cube_on(mesh), world);
       }},
      {"DTensor", 4, dtensor::topology_of(mesh_2x2, 4),
       [mesh_2x2](const Options& options, ProcessGroup&, DeviceMesh& mesh) {
         return std::make_unique<dtensor::DTensorStrategy>(options, mesh_2x2,
                                                           mesh);
       }},
      {"Ulysses", 2, Topology({"cp"}, {2}),
       over_tokens(sequence_parallel::Kind::kUlysses)},
      {"ring", 3, Topology({"cp"}, {3}),
       over_tokens(sequence_parallel::Kind::kRing)},
      {"Megatron SP", 2, Topology({"tp"}, {2}),
       [](const Options& options, ProcessGroup& world, DeviceMesh&) {
         return std::make_unique<sequence_parallel::MegatronStrategy>(
             options, sequence_parallel::MegatronOptions{}, 1, world);
       }},
      hybrid_way("DP x TP x PP, ZeRO-1", 2, 2, 1),
      hybrid_way("DP x TP, ZeRO-3", 3, 1, 3),
  };
}

/// Trains `steps` steps from `load` (or from the seed); returns the save.
std::string saved_by(const Way& way, const std::string& load,
                     std::int64_t steps) {
  const TempFolder folder;
  Options options = sharded_test::small_gpt(way.world_size, DType::kF32);
  options.steps = steps;
  options.load = load;
  options.save = folder.path() + "/saved.safetensors";
  options.check = false;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world,
                     shardbook::Run& run) {
    DeviceMesh mesh(world, way.topology);
    const std::unique_ptr<Strategy> strategy = way.make(options, world, mesh);
    run.train(options, *strategy);
  };
  run_and_compare(options, chapter);
  std::ifstream file(options.save, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ShardedCheckpoints, MoveBetweenAllWaysToCutLayers) {
  const std::vector<Way> ways = all_ways();
  for (const Way& saver : ways) {
    const std::string saved = saved_by(saver, "", 1);
    ASSERT_FALSE(saved.empty()) << saver.name;
    const TempFolder folder;
    const std::string path = folder.path() + "/from.safetensors";
    std::ofstream(path, std::ios::binary) << saved;
    for (const Way& loader : ways) {
      // Each saves, each loads, the first meets all: more pairs add nothing new
      if (kSanitized && &loader != &ways.front() && &saver != &ways.front()) {
        continue;
      }
      EXPECT_TRUE(saved_by(loader, path, 0) == saved)
          << saver.name << " to " << loader.name;
    }
  }
}

}  // namespace
}  // namespace shardbook
