// Recognition, garbled tables, rows that no chapter can run.

#include "bench/validate/kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "tests/validate/validate_support.h"

namespace shardbook::validate {
namespace {

using test::own_table;
using test::written;
using testing::HasSubstr;

const char kJobs[] =
    "row,layers,hidden,heads,vocab,devices,cluster,zero,micro_batch,batch,seq,"
    "dtype,recompute,measured,unit\n";
const char kJob[] =
    "small,2,256,4,512,8,a100-cloud,3,2,16,128,bf16,blocks,1000,"
    "tokens/s per device\n";

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
  EXPECT_THAT(text, HasSubstr("jobs"));
  EXPECT_THAT(text, HasSubstr("The nearest is"));
}

TEST(Tables, GarbledOnesAreOneSentence) {
  const std::string good = std::string(kJobs) + kJob;
  EXPECT_EQ(error_of(written(good)), "");
  EXPECT_THAT(error_of("/no/such/file.csv"), HasSubstr("cannot be read"));
  EXPECT_THAT(error_of("/"), HasSubstr("cannot be read"));
  EXPECT_THAT(error_of(written("")), HasSubstr("is empty"));
  EXPECT_THAT(error_of(written(kJobs)), HasSubstr("no rows"));
  EXPECT_THAT(error_of(written(std::string("a\0b\n1,2\n", 8))),
              HasSubstr("is no text"));
  EXPECT_THAT(error_of(written("a,b,a\n1,2,3\n")), HasSubstr("same name"));
  EXPECT_THAT(error_of(written(good + "tiny,2\n")),
              HasSubstr(":3: 2 values for 15 columns"));
  EXPECT_THAT(error_of(written(good + "\"tiny,2\n")), HasSubstr("quote"));
}

TEST(Tables, ValuesThatMakeNoSenseAreNamed) {
  const std::string good = std::string(kJobs) + kJob;
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
      {"1000,tokens", "0,tokens", "measured is 0"},
      {"1000,tokens", "nan,tokens", "measured is \"nan\""},
      {"512,8,a100", "512,0,a100", "devices is 0"},
      {"small", "a \"b", "quote"},
      {"row,", "raw,", "column raw is unknown in a table of jobs; known are"},
      {",unit", ",unti", "which also needs unit"},
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

TEST(Tables, OrderOfColumnsAndWhatWasMeasuredDoNotMatter) {
  const Validation one =
      validate(open_table(written(std::string(kJobs) + kJob, "one.csv")));
  const Validation two = validate(open_table(
      written("unit,source,measured,recompute,dtype,seq,batch,micro_batch,zero,"
              "cluster,devices,vocab,heads,hidden,layers,row\n"
              "tokens/s per device,\"a, b\",500,blocks,bf16,128,16,2,3,"
              "a100-cloud,8,512,4,256,2,small\n",
              "two.csv")));
  ASSERT_EQ(one.outcomes.size(), 1u);
  ASSERT_EQ(two.outcomes.size(), 1u);
  EXPECT_GT(one.outcomes[0].pair.predicted, 0);
  EXPECT_EQ(one.outcomes[0].pair.predicted, two.outcomes[0].pair.predicted);
  EXPECT_EQ(one.outcomes[0].row, two.outcomes[0].row);
  EXPECT_NE(one.outcomes[0].pair.published, two.outcomes[0].pair.published);
}

TEST(Tables, RowsThatNoChapterCanRunNameTheirColumn) {
  const std::string row = kJob;
  const auto other = [&](const char* from, const char* to) {
    return changed(row, from, to);
  };
  const Validation result = validate(open_table(written(
      kJobs + row + other("a100-cloud", "mi300") +
      other("a100-cloud", "mi300") + other("bf16", "fp4") +
      other("bf16", "fp8") + other(",3,", ",4,") + other("blocks", "half") +
      other("2,16,", "3,16,") + other("tokens/s per", "bananas per"))));
  EXPECT_EQ(result.outcomes.size(), 1u);
  ASSERT_EQ(result.not_expressed.size(), 8u);
  EXPECT_THAT(result.not_expressed[0].first, HasSubstr("table.csv:3"));
  const std::string text = as_text(result);
  for (const char* each :
       {"8 rows not expressed:\n",
        "2 x cluster or software: cluster \"mi300\" is unknown",
        "1 x dtype is \"fp4\"; bf16, f16, f32, fp8 are known",
        "1 x dtype is fp8, which a100-80gb has not", "1 x zero is \"4\"",
        "1 x recompute is \"half\"", "1 x batch is 16, which is no multiple",
        "1 x unit is \"bananas per device\""}) {
    EXPECT_THAT(text, HasSubstr(each));
  }
}

// A model by its name or file, or a GPT by its sizes: the same job.
TEST(Tables, ModelsHaveNamesFilesOrSizes) {
  const std::string columns =
      "model,devices,cluster,software,tp,sp,micro_batch,batch,seq,dtype,"
      "overlap,"
      "measured,unit\n";
  const std::string rest = ",8,dgx-h100,nemo,2,1,1,8,512,bf16,none,1,s\n";
  const auto seconds = [&](const std::string& model) {
    const Validation result =
        validate(open_table(written(columns + model + rest, "models.csv")));
    EXPECT_EQ(result.outcomes.size(), 1u) << as_text(result);
    return result.outcomes.empty() ? 0 : result.outcomes[0].pair.predicted;
  };
  const double by_name = seconds("llama-3.2-1b");
  EXPECT_GT(by_name, 0);
  const std::string text = R"({"model_type": "llama", "hidden_size": 2048,
      "num_hidden_layers": 16, "num_attention_heads": 32,
      "num_key_value_heads": 8, "intermediate_size": 8192,
      "vocab_size": 128256, "max_position_embeddings": 131072,
      "tie_word_embeddings": true})";
  written(text, "own.json");
  EXPECT_EQ(seconds("own.json"), by_name);  // beside the table
  // One that is counted, and not trained here
  const std::string olmo = changed(text, "\"llama\"", "\"olmo\"");
  written(olmo, "olmo.json");
  EXPECT_NEAR(seconds("olmo.json"), by_name, 0.05 * by_name);
  const Validation latent = validate(open_table(
      written(columns + own_table("models/deepseek-v3.json") + rest)));
  ASSERT_EQ(latent.not_expressed.size(), 1u);
  EXPECT_THAT(latent.not_expressed[0].second,
              HasSubstr("model deepseek_v3: has latent attention"));
}

// Nothing that predicts knows which table it reads.
TEST(Tables, NoSourceNamesOne) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(own_table("jobs.cpp")).parent_path();
  std::size_t tables = 0;
  for (const fs::directory_entry& table : fs::directory_iterator(folder)) {
    if (table.path().extension() != ".csv") continue;
    ++tables;
    for (const fs::directory_entry& source : fs::directory_iterator(folder)) {
      if (source.path().extension() != ".cpp") continue;
      EXPECT_THAT(read_bytes(source.path().string()),
                  testing::Not(HasSubstr(table.path().filename().string())))
          << source.path();
    }
  }
  EXPECT_GT(tables, 30u);
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
      open_table(written(kJobs + changed(kJob, "a100-cloud", "mi300"))));
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
