// The program itself: its options, output and exit status.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/command.h"
#include "tests/support/files.h"
#include "tests/validate/validate_support.h"

namespace shardbook {
namespace {

using testing::HasSubstr;
using testing::Not;

Outcome run_program(const std::string& arguments) {
  return run_command(std::string("'") + VALIDATE_PROGRAM + "' " + arguments +
                     " 2>&1");
}

TEST(ValidateProgram, PrintsEveryRowWhatNoChapterRunsAndTheSummary) {
  const Outcome result = run_program(
      "--table '" + test::own_table("korthikanti_table4_layer.csv") + "'");
  expect_done(
      result,
      {"MAPE", "aim: MAPE within 8 %: met",
       "1 rows not expressed:\n    1 x no chapter recomputes attention"});
}

// The file's device computes at half the speed.
TEST(ValidateProgram, PredictsWithAFileInPlaceOfAPreset) {
  const std::string file = test::written(
      R"({"extends": "selene",
          "device": {"extends": "a100-80gb", "sustained": 0.4}})",
      "slow.json");
  const std::string table =
      "--table '" + test::own_table("megatron_sc21_table1.csv") + "'";
  const auto mape = [](const std::string& output) {
    return std::stod(output.substr(output.find("MAPE ") + 5));
  };
  const Outcome with = run_program(table + " --cluster 'selene=" + file + "'");
  EXPECT_EQ(with.status, 0) << with.text;
  EXPECT_GT(mape(with.text), 30);
  EXPECT_LT(mape(run_program(table).text), 10);
  const Outcome wrong = run_program(table + " --cluster selene");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.text, HasSubstr("give PRESET=FILE.json"));
}

TEST(ValidateProgram, PrintsOneJsonObjectPerTable) {
  const Outcome result =
      run_program("--format json --table '" +
                  test::own_table("nccl_allreduce_h100_8gpu.csv") + "'");
  EXPECT_EQ(result.status, 0) << result.text;
  const auto object = nlohmann::json::parse(result.text);
  EXPECT_EQ(object["table"], "nccl_allreduce_h100_8gpu.csv");
  EXPECT_EQ(object["kind"], "nccl_collectives");
  EXPECT_EQ(object["rows"].size(), 32u);
  EXPECT_EQ(object["rows"][0]["published"], 13.67);
  EXPECT_EQ(object["aim"]["rows"], 11);
  EXPECT_EQ(object["aim"]["met"], true);
  EXPECT_TRUE(object["contests"].is_null());
}

// The page's own, and one that no chapter can run.
TEST(ValidateProgram, PredictsRowsOfOnesOwn) {
  const std::string page =
      read_bytes(std::string(SHARDBOOK_ROOT) + "/bench/own_rows.md");
  const std::size_t begin = page.find("```csv\n") + 7;
  std::string rows = page.substr(begin, page.find("```", begin) - begin);
  const std::string last = rows.substr(rows.find("FP8,"));
  std::string other = last;
  other.replace(other.find("fp8"), 3, "int4");
  const std::string table = test::written(rows + other);
  expect_done(run_program("--jobs '" + table + "'"),
              {"first try, tp 2 pp 1 dp 8, 8 x 1 [s]",
               "FP8, tp 2 pp 2 dp 16, 16 x 1 [tokens/s per device]",
               "1 rows not expressed", "dtype is \"int4\""});
  const Outcome wrong = run_program(
      "--jobs '" + test::own_table("nccl_busbw_reference.csv") + "'");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.text,
              HasSubstr("has no column devices, batch, seq, dtype"));
}

TEST(ValidateProgram, EndsWithStatus2AndASentenceForBadInput) {
  const std::string unknown = test::written("gpu,color\nA100,green\n");
  for (const std::string& arguments :
       {"--table '" + unknown + "'", std::string("--table /no/such/file"),
        std::string("--format xml"), std::string("--tabel x.csv")}) {
    const Outcome result = run_program(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_THAT(result.text, Not(HasSubstr("terminate"))) << arguments;
    EXPECT_FALSE(result.text.empty()) << arguments;
  }
}

// The page has these rows and no others: a change of a predictor, of a constant
// or of the script changes them. The fits themselves take minutes.
TEST(FitOfTheH100, PrintsTheRowsOfThePage) {
  const std::string bench = std::string(SHARDBOOK_ROOT) + "/bench";
  const Outcome result =
      run_command("python3 -B '" + bench + "/validate/fit_h100.py' '" +
                  VALIDATE_PROGRAM + "' --known 2>&1");
  EXPECT_EQ(result.status, 0) << result.text;
  std::ifstream page(bench + "/validation.md");
  std::string rows;
  for (std::string line; std::getline(page, line);) {
    const bool is_row =
        line.rfind("| fitted: ", 0) == 0 || line.rfind("| left out", 0) == 0;
    if (is_row) rows += line + "\n";
  }
  EXPECT_EQ(result.text, rows);
}

}  // namespace
}  // namespace shardbook
