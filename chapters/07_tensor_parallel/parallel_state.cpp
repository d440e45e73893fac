#include "chapters/07_tensor_parallel/parallel_state.h"

#include <algorithm>
#include <cstdint>
#include <functional>
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

/// Every pipeline's ranks that `of` picks.
std::vector<std::vector<int>> of_pipelines(
    const Topology& topology,
    const std::function<std::vector<int>(const std::vector<int>&)>& of) {
  std::vector<std::vector<int>> picked;
  for (const auto& pipeline : topology.groups({"pp"})) {
    picked.push_back(of(pipeline));
  }
  return picked;
}

void add_stage(std::vector<int>& ranks, const std::vector<int>& pipeline,
               int stage) {
  if (stage < 0) return;
  const int rank = pipeline[static_cast<std::size_t>(stage)];
  if (std::count(ranks.begin(), ranks.end(), rank) == 0) ranks.push_back(rank);
}

}  // namespace

Topology model_parallel_topology(int world_size,
                                 const ModelParallelSizes& sizes) {
  const auto& [t, p, v, split_rank] = sizes;
  SB_CHECK(t >= 1 && p >= 1 && v >= 1, "initialize_model_parallel: t = ", t,
           ", p = ", p, ", v = ", v, "; give 1 or more of each");
  // As 64 bits: the product of two sizes may leave an int
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
  std::vector<int> ranks;
  add_stage(ranks, pipeline, 0);
  add_stage(ranks, pipeline, split_rank);
  add_stage(ranks, pipeline, static_cast<int>(pipeline.size()) - 1);
  return ranks;
}

std::vector<int> position_embedding_ranks(const std::vector<int>& pipeline,
                                          int split_rank) {
  std::vector<int> ranks;
  add_stage(ranks, pipeline, 0);
  add_stage(ranks, pipeline, split_rank);
  return ranks;
}

ModelParallel::ModelParallel(ProcessGroup& world,
                             const ModelParallelSizes& sizes)
    : sizes_(sizes),
      mesh_(world, model_parallel_topology(world.size(), sizes)) {
  // Groups are made on all ranks, also those of several axes
  mesh_.group("tp-pp");
  const auto make = [&](std::vector<int> (*of)(const std::vector<int>&, int),
                        const char* name) {
    return world.partition(of_pipelines(mesh_.topology(),
                                        [&](const std::vector<int>& pipeline) {
                                          return of(pipeline,
                                                    sizes_.split_rank);
                                        }),
                           name);
  };
  embedding_ = make(embedding_ranks, "embedding");
  position_embedding_ = make(position_embedding_ranks, "position embedding");
}

std::unique_ptr<ModelParallel> initialize_model_parallel(ProcessGroup& world,
                                                         int t, int p, int v,
                                                         int split_rank) {
  ModelParallelSizes sizes;
  sizes.t = t;
  sizes.p = p;
  sizes.v = v;
  sizes.split_rank = split_rank;
  return std::make_unique<ModelParallel>(world, sizes);
}

}  // namespace shardbook::tensor_parallel
