// Recognition, garbled tables, rows that no chapter can run.

#include "bench/validate/kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bench/validate/validation.h"
#include "tests/support/errors.h"
#include "tests/validate/validate_support.h"

namespace shardbook::validate {
namespace {

using test::own_table;
using test::written;
using testing::HasSubstr;

const char kMpt[] =
    "model,layers,hidden,heads,vocab,seq_len,gpus,gpu,precision,sharding,"
    "activation_ckpt,activation_cpu_offload,micro_batch,grad_accum,"
    "global_batch,num_params,tokens_per_s_per_gpu\n";
const char kMptRow[] =
    "small,2,256,4,512,128,8,a100_80gb,bf16,FULL_SHARD,True,False,2,1,16,"
    "1800000,1000\n";

std::string error_of(const std::string& file) {
  return shardbook::error_of([&] { validate(open_table(file)); });
}

/// With one value in place of another.
std::string changed(const std::string& text, const std::string& from,
                    const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.substr(0, at) + to + text.substr(at + from.size());
}

TEST(Kinds, UnknownColumnsAreNamedBesideWhatIsKnown) {
  const std::string text = error_of(written("gpu,color\nA100,green\n"));
  EXPECT_THAT(text, HasSubstr("table.csv: no known kind"));
  EXPECT_THAT(text, HasSubstr("gpu, color"));
  EXPECT_THAT(text, HasSubstr("nccl_collectives"));
  EXPECT_THAT(text, HasSubstr("mpt_fsdp"));
  EXPECT_THAT(text, HasSubstr("The nearest is"));
}

TEST(Tables, GarbledOnesAreOneSentence) {
  const std::string good = std::string(kMpt) + kMptRow;
  EXPECT_EQ(error_of(written(good)), "");
  EXPECT_THAT(error_of("/no/such/file.csv"), HasSubstr("cannot be read"));
  EXPECT_THAT(error_of("/"), HasSubstr("cannot be read"));
  EXPECT_THAT(error_of(written("")), HasSubstr("is empty"));
  EXPECT_THAT(error_of(written(kMpt)), HasSubstr("no rows"));
  EXPECT_THAT(error_of(written(std::string("a\0b\n1,2\n", 8))),
              HasSubstr("is no text"));
  EXPECT_THAT(error_of(written("a,b,a\n1,2,3\n")), HasSubstr("same name"));
  EXPECT_THAT(error_of(written(good + "tiny,2\n")),
              HasSubstr(":3: 2 values for 17 columns"));
  EXPECT_THAT(error_of(written(good + "\"tiny,2\n")), HasSubstr("quote"));
}

TEST(Tables, ValuesThatMakeNoSenseAreNamed) {
  const std::string good = std::string(kMpt) + kMptRow;
  const struct {
    const char *from, *to, *message;
  } cases[] = {
      {"small,2,", "small,two,", "layers is \"two\", which is no number"},
      {"small,2,", "small,0,", "layers is 0; give a whole number from 1"},
      {"small,2,", "small,-3,", "layers is -3"},
      {"small,2,", "small,2.5,", "layers is 2.5, which is no whole number"},
      {"small,2,", "small,,", "layers is \"\""},
      {"small,2,", "small,99999999,", "give a whole number from 1 to 2000"},
      {"256,4,", "256,5,", "hidden is 256, which is no multiple of 5 heads"},
      {"True,False", "maybe,False", "activation_ckpt is \"maybe\""},
      {"1800000,1000", "1800000,0", "tokens_per_s_per_gpu is 0"},
      {"1800000,1000", "1800000,nan", "tokens_per_s_per_gpu is \"nan\""},
      {"128,8,a100", "128,100000,a100", "100000"},
  };
  for (const auto& each : cases) {
    EXPECT_THAT(error_of(written(changed(good, each.from, each.to))),
                HasSubstr(each.message));
  }
}

TEST(Tables, ShapesOfAttentionThatMakeNoSenseAreNamed) {
  const std::string good =
      "api,gpu,phase,world,tokens_per_gpu,shape,variant,iter_per_s\n"
      "batch,A100,fwd,2,64,\"(4 q heads, 2 kv heads, d=16)\",ring,9\n";
  EXPECT_EQ(error_of(written(good)), "");
  EXPECT_THAT(error_of(written(changed(good, "4 q heads", "many heads"))),
              HasSubstr("table.csv:2: shape is \"(many heads"));
  EXPECT_THAT(error_of(written(changed(good, "4 q heads", "3 q heads"))),
              HasSubstr("multiple of kv heads"));
}

TEST(Tables, OrderOfColumnsAndFurtherOnesDoNotMatter) {
  const Validation one =
      validate(open_table(written(std::string(kMpt) + kMptRow, "one.csv")));
  const Validation two = validate(open_table(
      written("num_params,remark,tokens_per_s_per_gpu,global_batch,grad_accum,"
              "micro_batch,activation_cpu_offload,activation_ckpt,sharding,"
              "precision,gpu,gpus,seq_len,vocab,heads,hidden,layers,model\n"
              "1800000,\"a, b\",500,16,1,2,False,True,FULL_SHARD,bf16,"
              "a100_80gb,8,128,512,4,256,2,small\n",
              "two.csv")));
  ASSERT_EQ(one.outcomes.size(), 1u);
  ASSERT_EQ(two.outcomes.size(), 1u);
  EXPECT_GT(one.outcomes[0].pair.predicted, 0);
  // What was measured is no part of the prediction
  EXPECT_EQ(one.outcomes[0].pair.predicted, two.outcomes[0].pair.predicted);
  EXPECT_EQ(one.outcomes[0].row, two.outcomes[0].row);
  EXPECT_NE(one.outcomes[0].pair.published, two.outcomes[0].pair.published);
}

TEST(Tables, RowsThatNoChapterCanRunAreListedAndCounted) {
  const std::string row = kMptRow;
  const Validation result = validate(open_table(written(
      kMpt + row + changed(row, "a100_80gb", "mi300") +
      changed(row, "a100_80gb", "mi300") + changed(row, "bf16", "amp_fp8") +
      changed(row, "FULL_SHARD", "SHARD_GRAD_OP") +
      changed(row, "True,False", "True,True"))));
  EXPECT_EQ(result.outcomes.size(), 1u);
  ASSERT_EQ(result.not_expressed.size(), 5u);
  EXPECT_THAT(result.not_expressed[0].first, HasSubstr("table.csv:3"));
  EXPECT_EQ(result.not_expressed[0].second, "no cluster has mi300");
  const std::string text = as_text(result);
  EXPECT_THAT(text, HasSubstr("5 rows not expressed:\n"));
  EXPECT_THAT(text, HasSubstr("2 x no cluster has mi300"));
  EXPECT_THAT(text, HasSubstr("1 x precision amp_fp8"));
}

TEST(Tables, FabricsMayBeNamedInsteadOfDescribed) {
  const Validation described =
      validate(open_table(own_table("nccl_busbw_reference.csv")));
  const Validation named = validate(open_table(
      written("fabric,allreduce_busbw_GBps\nNVLink3 A100 8-GPU,232\n"
              "NVLink4 H100 8-GPU,370\nNVLink4 SHARP H100 8-GPU,480\n"
              "\"DGX H100 NVL4 + 8x400Gb RDMA, multi-node\",380\n"
              "\"DGX H100 SHARP 8x400Gb RDMA, multi-node\",480\n"
              "carrier pigeons,1\n")));
  EXPECT_EQ(named.not_expressed.size(), 1u);
  ASSERT_EQ(named.outcomes.size(), 5u);
  for (const Outcome& each : named.outcomes) {
    const auto same = std::find_if(
        described.outcomes.begin(), described.outcomes.end(),
        [&](const Outcome& other) { return other.row == each.row; });
    ASSERT_NE(same, described.outcomes.end()) << each.row;
    EXPECT_EQ(each.pair.predicted, same->pair.predicted) << each.row;
  }
}

TEST(Tables, NothingToJudgeIsNoAimMet) {
  const Validation result = validate(
      open_table(written(kMpt + changed(kMptRow, "a100_80gb", "mi300"))));
  EXPECT_FALSE(result.meets_aim);
  EXPECT_THAT(as_text(result), HasSubstr("nothing to judge"));
}

TEST(Digits, MayBeRoundedOrCutOff) {
  EXPECT_DOUBLE_EQ(last_digit("16.6"), 0.1);
  EXPECT_DOUBLE_EQ(last_digit("257"), 1);
  EXPECT_TRUE(is_printed_as(257.75, 257, 1));
  EXPECT_TRUE(is_printed_as(257.75, 258, 1));
  EXPECT_FALSE(is_printed_as(257.75, 259, 1));
  EXPECT_FALSE(is_printed_as(256.9, 258, 1));
  EXPECT_TRUE(is_printed_as(16.641, 16.6, 0.1));
  EXPECT_FALSE(is_printed_as(16.66, 16.5, 0.1));
}

}  // namespace
}  // namespace shardbook::validate
