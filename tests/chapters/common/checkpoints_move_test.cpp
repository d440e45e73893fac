// Checkpoints move freely: a checkpoint of one way to cut layers is loaded by
// every other one, on another number of ranks, bit for bit.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "chapters/programs/programs.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

const std::string kWays[] = {
    "07_tensor_parallel --world-size 3",
    "07_tensor_parallel --world-size 8",
    "08_tensor_parallel_2d --world-size 4",
    "09_tensor_parallel_2p5d --world-size 8",
    "10_tensor_parallel_3d --world-size 8",
    "11_dtensor --world-size 4 --mesh 2x2",
    "12_sequence_parallel --world-size 2 --kind ulysses",
    "12_sequence_parallel --world-size 3 --kind ring",
    "12_sequence_parallel --world-size 2 --kind megatron",
    "14_hybrid_3d --world-size 8 --tp 2 --pp 2 --zero-stage 1 "
    "--micro-batches 2",
    "14_hybrid_3d --world-size 6 --tp 3 --zero-stage 3 --micro-batches 2",
};

/// What a run saves: a small GPT whose sizes divide by 2, 3, 4 and 8.
std::string saved_by(const std::string& line) {
  const TempFolder folder;
  const std::string path = folder / "saved.safetensors";
  run(line +
      R"( --model '{"vocab_size": 96, "n_positions": 16, "n_embd": 48,
                    "n_layer": 2, "n_head": 24}'
          --data walk --batch 8 --seq 6 --cluster none --no-check --save )" +
      path);
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ShardedCheckpoints, MoveBetweenAllWaysToCutLayers) {
  for (const std::string& saver : kWays) {
    const std::string saved = saved_by(saver + " --steps 1");
    ASSERT_FALSE(saved.empty()) << saver;
    const TempFolder folder;
    const std::string path = folder / "from.safetensors";
    std::ofstream(path, std::ios::binary) << saved;
    for (const std::string& loader : kWays) {
      // Each saves, each loads, the first meets all: more pairs add nothing new
      if (kSanitized && &loader != kWays && &saver != kWays) continue;
      EXPECT_TRUE(saved_by(loader + " --steps 0 --load " + path) == saved)
          << saver << " to " << loader;
    }
  }
}

}  // namespace
}  // namespace shardbook
