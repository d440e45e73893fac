// Batch arithmetic: two numbers give the third.

#include "core/check.h"
#include "tests/chapters/15_engine/engine_support.h"

namespace shardbook::engine {
namespace {

// A message's numbers were given, and its advice works.
TEST(EngineBatch, AdviceCanBeFollowed) {
  for (const std::int64_t train : {1, 2, 7, 16}) {
    for (const std::int64_t micro : {0, 1, 3}) {
      for (const std::int64_t g : {0, 1, 2, 5}) {
        for (const std::int64_t dp : {1, 2, 3}) {
          try {
            resolve_batch({train, micro, g}, dp);
          } catch (const Error& error) {
            const std::string text = error.what();
            EXPECT_EQ(text.find("per_gpu 0"), std::string::npos) << text;
            EXPECT_EQ(text.find("per_gpu ") != text.npos, micro > 0) << text;
            EXPECT_EQ(text.find("steps ") != text.npos, g > 0) << text;
            const std::int64_t advised =
                std::stoll(text.substr(text.rfind(' ')));
            EXPECT_NO_THROW(resolve_batch({advised, micro, g}, dp)) << text;
          }
        }
      }
    }
  }
}

BatchSizes sizes(std::int64_t train, std::int64_t micro, std::int64_t g,
                 std::int64_t dp) {
  return resolve_batch({train, micro, g}, dp);
}

TEST(EngineBatch, TwoNumbersGiveTheThird) {
  EXPECT_EQ(sizes(0, 3, 2, 4).train, 24);
  EXPECT_EQ(sizes(24, 0, 2, 4).micro, 3);
  EXPECT_EQ(sizes(24, 3, 0, 4).accumulation, 2);
  EXPECT_EQ(sizes(24, 3, 2, 4).train, 24);
}

TEST(EngineBatch, OneNumberMeansNoAccumulation) {
  // Golden: train 16 on 4 ranks and nothing else
  const BatchSizes train = sizes(16, 0, 0, 4);
  EXPECT_EQ(train.micro, 4);
  EXPECT_EQ(train.accumulation, 1);
  const BatchSizes micro = sizes(0, 5, 0, 3);
  EXPECT_EQ(micro.train, 15);
  EXPECT_EQ(micro.accumulation, 1);
}

TEST(EngineBatch, ARemainderIsAnErrorThatNamesWhatWasGiven) {
  const auto error = [](std::int64_t train, std::int64_t micro, std::int64_t g,
                        std::int64_t dp) {
    return shardbook::error_of([&] { sizes(train, micro, g, dp); });
  };
  // Golden: train 16, micro 3 on 4 ranks
  EXPECT_EQ(error(16, 3, 0, 4),
            "train_batch_size 16 is not a multiple of "
            "train_micro_batch_size_per_gpu 3 x data-parallel ranks 4; give a "
            "multiple of 12");
  EXPECT_EQ(error(16, 0, 3, 4),
            "train_batch_size 16 is not a multiple of "
            "gradient_accumulation_steps 3 x data-parallel ranks 4; give a "
            "multiple of 12");
  EXPECT_EQ(error(24, 3, 3, 4),
            "train_batch_size 24 is not train_micro_batch_size_per_gpu 3 x "
            "gradient_accumulation_steps 3 x data-parallel ranks 4; give 36");
  EXPECT_EQ(error(2, 0, 0, 3),
            "train_batch_size 2 is not a multiple of data-parallel ranks 3; "
            "give a multiple of 3");
  EXPECT_EQ(error(0, 0, 4, 2),
            "gradient_accumulation_steps 4 alone does not say how large a "
            "batch is; give train_batch_size, train_micro_batch_size_per_gpu, "
            "or both");
  expect_text(error(0, 0, 0, 2), {"give train_batch_size"});
  expect_text(error(0, std::int64_t{1} << 40, std::int64_t{1} << 20, 1 << 16),
              {"too many samples"});
}

}  // namespace
}  // namespace shardbook::engine
