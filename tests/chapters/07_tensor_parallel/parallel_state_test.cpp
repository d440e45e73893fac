// Megatron-LM's process groups.

#include "chapters/07_tensor_parallel/parallel_state.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/ops.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::tensor_parallel {
namespace {

using Ranks = std::vector<int>;
using Groups = std::vector<Ranks>;

// Topology's own test checks the lists.
TEST(ModelParallel, GroupsOfSixteenRanksAreThoseOfMegatron) {
  const Topology grid = model_parallel_topology(16, {2, 4});
  EXPECT_EQ(grid.text(), Topology::megatron(2, 1, 2, 4).text());
  EXPECT_EQ(grid.groups({"tp", "pp"}),
            (Groups{{0, 1, 4, 5, 8, 9, 12, 13}, {2, 3, 6, 7, 10, 11, 14, 15}}));
}

TEST(ModelParallel, EmbeddingsAreOnTheFirstTheLastAndTheSplitStage) {
  const Ranks pipeline = {1, 5, 9, 13};
  EXPECT_EQ(embedding_ranks(pipeline), (Ranks{1, 13}));
  EXPECT_EQ(position_embedding_ranks(pipeline), (Ranks{1}));
  EXPECT_EQ(embedding_ranks(pipeline, 2), (Ranks{1, 9, 13}));
  EXPECT_EQ(position_embedding_ranks(pipeline, 2), (Ranks{1, 9}));
  // The decoder is the last stage: listed once
  EXPECT_EQ(embedding_ranks(pipeline, 3), (Ranks{1, 13}));
  EXPECT_EQ(position_embedding_ranks(pipeline, 3), (Ranks{1, 13}));
  EXPECT_EQ(embedding_ranks({7}), (Ranks{7}));
}

struct Seen {
  Groups groups;  ///< tensor, data, pipeline, model, embedding, position
  double embedding_sum = 0;
  bool is_decoder = false;
};

Ranks ranks_of(ProcessGroup* group) {
  return group == nullptr ? Ranks{} : group->ranks();
}

std::vector<Seen> seen_on_16(int split_rank) {
  return on_ranks(16, [&](ProcessGroup& world) {
    const auto state = initialize_model_parallel(world, 2, 4, 1, split_rank);
    Seen seen;
    seen.groups = {
        state->tensor().ranks(),      state->data().ranks(),
        state->pipeline().ranks(),    state->model().ranks(),
        ranks_of(state->embedding()), ranks_of(state->position_embedding())};
    seen.is_decoder = state->is_decoder();
    if (state->embedding() != nullptr) {
      const Tensor x = Tensor::full({1}, world.rank());
      state->embedding()->all_reduce(x).wait();
      seen.embedding_sum = x.item();
    }
    return seen;
  });
}

TEST(ModelParallel, ARankHasItsGroups) {
  const auto seen = seen_on_16(-1);
  EXPECT_EQ(seen[6].groups, (Groups{{6, 7},
                                    {4, 6},
                                    {2, 6, 10, 14},
                                    {2, 3, 6, 7, 10, 11, 14, 15},
                                    {},
                                    {}}));
  EXPECT_EQ(seen[15].groups, (Groups{{14, 15},
                                     {13, 15},
                                     {3, 7, 11, 15},
                                     {2, 3, 6, 7, 10, 11, 14, 15},
                                     {3, 15},
                                     {}}));
  EXPECT_EQ(seen[3].groups[4], (Ranks{3, 15}));
  EXPECT_EQ(seen[3].groups[5], (Ranks{3}));
  EXPECT_EQ(seen[3].embedding_sum, 18);
  EXPECT_TRUE(seen[0].is_decoder);
}

TEST(ModelParallel, ADecoderHasEmbeddingsOfItsOwn) {
  const auto seen = seen_on_16(2);
  EXPECT_EQ(seen[11].groups[4], (Ranks{3, 11, 15}));
  EXPECT_EQ(seen[11].groups[5], (Ranks{3, 11}));
  EXPECT_EQ(seen[11].embedding_sum, 29);
  EXPECT_EQ(seen[7].groups[4], (Ranks{}));
  EXPECT_FALSE(seen[7].is_decoder);
  EXPECT_TRUE(seen[11].is_decoder);
}

// Chunk i of rank r is virtual stage i p + r.
TEST(ModelParallel, VirtualStagesTakeTurns) {
  const auto stages = on_ranks(2, [](ProcessGroup& world) {
    const auto state = initialize_model_parallel(world, 1, 2, 3);
    std::vector<int> seen;
    for (int chunk = 0; chunk < 3; ++chunk) {
      seen.push_back(state->virtual_stage(chunk));
      seen.push_back(state->is_first(chunk));
      seen.push_back(state->is_last(chunk));
    }
    return seen;
  });
  EXPECT_EQ(stages[0], (Ranks{0, 1, 0, 2, 0, 0, 4, 0, 0}));
  EXPECT_EQ(stages[1], (Ranks{1, 0, 0, 3, 0, 0, 5, 0, 1}));
}

TEST(ModelParallel, IllegalSizesAreRefusedWithThoseThatWouldWork) {
  const std::vector<std::pair<ModelParallelSizes, std::string>> cases = {
      {ModelParallelSizes{3, 4},
       "t = 3 times p = 4 does not divide 16 ranks; give sizes "
       "whose product is one of 1, 2, 4, 8, 16"},
      {ModelParallelSizes{1 << 20, 1 << 20}, "does not divide 16 ranks"},
      {ModelParallelSizes{0, 4}, "t = 0, p = 4, v = 1; give 1 or more of each"},
      {ModelParallelSizes{2, 1, 2}, "give p of 2 or more, or v = 1"},
      {ModelParallelSizes{2, 1, 1, 1}, "give p of 2 or more, or no split_rank"},
      {ModelParallelSizes{2, 4, 1, 4}, "split_rank 4: with p = 4, give 1 to 3"},
      {ModelParallelSizes{2, 4, 1, 0}, "split_rank 0: with p = 4, give 1 to 3"},
  };
  for (const auto& [sizes, expected] : cases) {
    expect_error([&, sizes = sizes] { model_parallel_topology(16, sizes); },
                 {expected});
  }
}

}  // namespace
}  // namespace shardbook::tensor_parallel
