// The lesson's DDP: the real one gives the same gradients bit for bit, in fewer
// messages.

#include <gtest/gtest.h>

#define SHARDBOOK_LESSON_WITHOUT_MAIN
#include "chapters/02_ddp/lesson.cpp"
#include "tests/chapters/02_ddp/ddp_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::ddp_test {
namespace {

struct AveragedGradients {
  Values gradients;
  std::size_t messages = 0;
};

class LessonDdpParity : public testing::TestWithParam<int> {};

TEST_P(LessonDdpParity, GradientsEqualTheReducersBitForBit) {
  const int d = GetParam();
  const auto average = [&](bool is_lesson) {
    return on_ranks(d, [&](ProcessGroup& dp) {
      Sequential model = make_mlp(DType::kF32, /*seed=*/1);
      const Samples own = every(make_samples(24, DType::kF32), dp.rank(), d);
      AveragedGradients result;
      if (is_lesson) {
        const std::size_t before = dp.records().size();
        mse_loss(model(own.x), own.y).backward();
        ddp::average_gradients(model, dp);
        result.messages = dp.records().size() - before;
      } else {
        ddp::DistributedDataParallel ddp(model, dp);
        const std::size_t before = dp.records().size();
        mse_loss(ddp(own.x), own.y).backward();
        result.messages = dp.records().size() - before;
      }
      result.gradients = grads_of(model);
      return result;
    });
  };
  const auto lesson = average(true), real = average(false);
  for (int rank = 0; rank < d; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_EQ(lesson[r].gradients, real[r].gradients) << "rank " << rank;
    EXPECT_EQ(lesson[r].gradients, lesson[0].gradients) << "rank " << rank;
    if (d > 1) {
      EXPECT_EQ(lesson[r].messages, 6u);
      EXPECT_LT(real[r].messages, lesson[r].messages);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, LessonDdpParity,
                         testing::ValuesIn(world_sizes()));

}  // namespace
}  // namespace shardbook::ddp_test
