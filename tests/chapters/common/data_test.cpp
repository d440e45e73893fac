// Data: files, random tokens, the book itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/run/training.h"
#include "core/context.h"
#include "core/tensor_storage.h"
#include "core/xtensor.h"
#include "tests/chapters/common/common_support.h"

namespace shardbook::common_test {
namespace {

std::vector<std::int64_t> ints(const Tensor& x) {
  return x.to_vector<std::int64_t>();
}

using Ints = std::vector<std::int64_t>;

class DatasetFiles : public CommonFiles {};

TEST_F(DatasetFiles, SamplesFollowEachOtherAndWrapAtTheEnd) {
  // 10 bytes, samples of 3: 0..2, 3..5, 6..8; targets one further.
  const Dataset data =
      Dataset::open(write("ten", "0123456789"), 3, 256, /*seed=*/0);
  EXPECT_EQ(data.num_tokens(), 10);
  EXPECT_EQ(data.num_samples(), 3);
  const Batch first = data.batch(0, 2);
  EXPECT_EQ(ints(first.inputs), (Ints{'0', '1', '2', '3', '4', '5'}));
  EXPECT_EQ(ints(first.targets), (Ints{'1', '2', '3', '4', '5', '6'}));
  const Batch second = data.batch(1, 2);
  EXPECT_EQ(ints(second.inputs), (Ints{'6', '7', '8', '0', '1', '2'}));
  // Far beyond the end.
  EXPECT_EQ(ints(data.batch(300, 2).inputs), ints(first.inputs));
  EXPECT_EQ(memory_kind_of(first.inputs), MemoryKind::kInput);
}

TEST_F(DatasetFiles, RanksReadRowsOfTheGlobalBatch) {
  const Dataset data = Dataset::open(
      write("text", std::string(100, 'a') + "bcdefghij"), 2, 256, 0);
  const Batch whole = data.batch(7, 6);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const Batch mine = data.batch(7, 6, BatchSlice{rank, 3}, 2);
    EXPECT_EQ(mine.slice.first, rank);
    EXPECT_EQ(mine.slice.stride, 3);
    for (std::int64_t i = 0; i < 2; ++i) {
      const std::int64_t row = rank + 3 * i;
      EXPECT_EQ(ints(mine.inputs.rows_view(i, i + 1)),
                ints(whole.inputs.rows_view(row, row + 1)));
      EXPECT_EQ(ints(mine.targets.rows_view(i, i + 1)),
                ints(whole.targets.rows_view(row, row + 1)));
    }
  }
}

TEST_F(DatasetFiles, LogitsBecomeANumPyArray) {
  Options options;
  options.model = "gpt-nano";
  options.data = "walk";
  options.batch = 2, options.seq = 8;
  options.logits = path("logits.npy");
  const LoadedModel loaded = build_model(options);
  const Dataset data = Dataset::open(options, loaded.config);
  save_results(options, loaded, data);
  EXPECT_TRUE(bitwise_equal(load_npy(options.logits),
                            (*loaded.model)(data.batch(0, 2).inputs)));
}

TEST_F(DatasetFiles, ExactlyOneSampleIsEnough) {
  EXPECT_EQ(Dataset::open(write("a", "abcd"), 3, 256, 0).num_samples(), 1);
  expect_error([&] { Dataset::open(write("a", "abc"), 3, 256, 0); },
               {"3 tokens", "--seq 3", "need 4"});
}

TEST_F(DatasetFiles, BadOnesAreRefusedWithASentence) {
  const auto expect_refused = [](const std::string& file, std::int64_t seq,
                                 std::int64_t vocab,
                                 const std::vector<std::string>& parts) {
    expect_error([&] { Dataset::open(file, seq, vocab, 0); }, parts);
  };
  const std::string not_text = std::string("ab\xff") + "cd";
  expect_refused(path("none"), 3, 256,
                 {"none", "cannot be read", "No such file"});
  expect_refused(write("e", ""), 3, 256, {"/e", "empty"});
  expect_refused(write("odd.u16", "abc"), 1, 50257,
                 {"odd.u16", "3 bytes", "16-bit"});
  expect_refused(write("big", "abz"), 1, 'b' + 1,
                 {"token 122", "position 2", "vocabulary of 99"});
  expect_refused(write("t.txt", not_text), 1, 256,
                 {"t.txt", "byte 2", "UTF-8"});
  EXPECT_EQ(Dataset::open(write("t", not_text), 1, 256, 0).num_tokens(), 5);
  expect_refused("random", 0, 256, {"--seq 0"});
  expect_refused(path(""), 3, 256, {"cannot be read"});
}

TEST(Dataset, RandomTokensDependOnTheSeed) {
  auto draw = [](std::uint64_t seed) {
    return ints(Dataset::open("random", 64, 11, seed).batch(0, 4).inputs);
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
  for (std::int64_t token : draw(3)) {
    EXPECT_GE(token, 0);
    EXPECT_LT(token, 11);
  }
}

TEST(Dataset, AWalkGoesUpByOneToThree) {
  const auto draw = [](std::uint64_t seed) {
    const Batch batch = Dataset::open("walk", 64, 256, seed).batch(2, 4);
    const auto tokens = ints(batch.inputs), targets = ints(batch.targets);
    std::vector<std::int64_t> steps;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_LT(tokens[i], 32);
      steps.push_back((targets[i] - tokens[i] + 32) % 32);
    }
    return steps;
  };
  EXPECT_NE(draw(1), draw(2));
  const auto steps = draw(3);
  for (const std::int64_t step : {1, 2, 3}) {
    EXPECT_GT(std::count(steps.begin(), steps.end(), step), 64) << step;
  }
  EXPECT_EQ(std::count_if(steps.begin(), steps.end(),
                          [](std::int64_t s) { return s < 1 || s > 3; }),
            0);
}

TEST(Dataset, TheBookReadsItself) {
  const Dataset data = Dataset::open("book", 64, 256, 0);
  EXPECT_EQ(data.num_tokens(), static_cast<std::int64_t>(book_text().size()));
  EXPECT_EQ(utf8_problem(book_text()), "");
}

TEST(Dataset, OnMetaItHasShapes) {
  RankContext context(Device::meta());
  RankContext::Scope scope(context);
  const Batch batch = Dataset::open("random", 8, 256, 0).batch(3, 5);
  EXPECT_TRUE(batch.inputs.is_meta());
  EXPECT_EQ(batch.targets.shape(), (Shape{5, 8}));
}

TEST(Utf8, IsCheckedAsUnicodeSays) {
  EXPECT_EQ(utf8_problem("plain, \xc3\xa9, \xe4\xb8\xad, \xf0\x9f\x98\x80"),
            "");
  for (const std::string bad :
       {"\x80", "a\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_NE(utf8_problem(bad), "");
  }
}

}  // namespace
}  // namespace shardbook::common_test
