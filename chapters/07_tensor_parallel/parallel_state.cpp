#include "chapters/07_tensor_parallel/parallel_state.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

/// "1, 2, 4".
std::string divisors_text(int n) {
  std::ostringstream text;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) text << (d == 1 ? "" : ", ") << d;
  }
  return text.str();
}

/// The ranks of these stages, each once; negative stages are ignored.
std::vector<int> ranks_of(const std::vector<int>& pipeline,
                          const std::vector<int>& stages) {
  std::vector<int> ranks;
  for (const int stage : stages) {
    if (stage < 0) continue;
    const int rank = pipeline[static_cast<std::size_t>(stage)];
    if (std::count(ranks.begin(), ranks.end(), rank) == 0) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace

Topology model_parallel_topology(int world_size,
                                 const ModelParallelSizes& sizes) {
  const auto& [t, p, v, split_rank] = sizes;
  SB_CHECK(t >= 1 && p >= 1 && v >= 1, "initialize_model_parallel: t = ", t,
           ", p = ", p, ", v = ", v, "; give 1 or more of each");
  // In 64 bits: the product of two sizes may overflow an int
  SB_CHECK(world_size % (std::int64_t{t} * p) == 0,
           "initialize_model_parallel: t = ", t, " times p = ", p,
           " does not divide ", world_size,
           " ranks; give sizes whose product is one of ",
           divisors_text(world_size));
  SB_CHECK(v == 1 || p > 1, "initialize_model_parallel: v = ", v,
           " virtual stages take turns with those of other ranks; give p of 2 "
           "or more, or v = 1");
  SB_CHECK(split_rank == -1 || p > 1, "initialize_model_parallel: split_rank ",
           split_rank,
           ": encoder and decoder need a stage each; give p of 2 or "
           "more, or no split_rank");
  SB_CHECK(split_rank == -1 || (split_rank >= 1 && split_rank < p),
           "initialize_model_parallel: split_rank ", split_rank,
           ": with p = ", p, ", give 1 to ", p - 1);
  return Topology::megatron(t, 1, world_size / (t * p), p);
}

std::vector<int> embedding_ranks(const std::vector<int>& pipeline,
                                 int split_rank) {
  const int last = static_cast<int>(pipeline.size()) - 1;
  return ranks_of(pipeline, {0, split_rank, last});
}

std::vector<int> position_embedding_ranks(const std::vector<int>& pipeline,
                                          int split_rank) {
  return ranks_of(pipeline, {0, split_rank});
}

ModelParallel::ModelParallel(ProcessGroup& world,
                             const ModelParallelSizes& sizes)
    : ModelParallel(world, model_parallel_topology(world.size(), sizes),
                    sizes.v, sizes.split_rank) {}

ModelParallel::ModelParallel(ProcessGroup& world, const Topology& topology,
                             int v, int split_rank)
    : sizes_{topology.size("tp"), topology.size("pp"), v, split_rank},
      mesh_(world, topology) {
  // Create all groups on all ranks, also groups over several axes
  mesh_.group("tp-pp");
  std::vector<std::vector<int>> embedding, position;
  for (const auto& pipeline : mesh_.topology().groups({"pp"})) {
    embedding.push_back(embedding_ranks(pipeline, split_rank));
    position.push_back(position_embedding_ranks(pipeline, split_rank));
  }
  embedding_ = world.partition(embedding, "embedding");
  position_embedding_ = world.partition(position, "position embedding");
}

}  // namespace shardbook::tensor_parallel
