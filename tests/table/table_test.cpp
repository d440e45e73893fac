#include "chapters/table/table.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "chapters/common/run/exit_status.h"
#include "chapters/table/run.h"
#include "core/check.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"
#include "tests/table/marks_support.h"

namespace shardbook::table {
namespace {

// One run as a chapter prints it; every value that a test changes is here.
struct Sample {
  std::string chapter = R"("02_ddp")";
  std::string world_size = "2";
  std::string loss = R"({"first": 5.5478, "last": 2.9061})";
  std::string max_rel = "3.14e-07";
  std::string bytes = R"([{"predicted": 3355440, "counted": 3355440},
                          {"predicted": 3355440, "counted": 3355440}])";
  std::string held = R"([
      {"parameter": {"predicted": 1048576, "counted": 1048576},
       "gradient": {"predicted": 524288, "counted": 524288}}])";
  std::string peak = R"([{"parameter": {"simulated": 1, "counted": 2097152},
                          "gradient": {"counted": 1048576}}])";
  std::string claims = R"({"numbers": "passed", "bytes": "passed",
                           "memory": "passed", "time": "not measured"})";
  std::string wall = R"({"step_s": 0.0412})";
  std::string virtual_run = "null";
  std::string backend = "threads";
  std::string more = "";  // members of the object, each with a comma behind it

  std::string json() const {
    return "{" + more + R"("chapter": )" + chapter +
           R"(, "options": {"world_size": )" + world_size +
           R"(, "backend": ")" + backend + R"("}, "loss": )" + loss +
           R"(, "parity": {"max_abs": 1e-8, "tolerance": 1e-5, "max_rel": )" +
           max_rel + R"(}, "bytes": )" + bytes + R"(, "held_memory": )" + held +
           R"(, "peak_memory": )" + peak + R"(, "claims": )" + claims +
           R"(, "virtual": )" + virtual_run + R"(, "wall": )" + wall + "}";
  }
  ProgramRun read() const { return read_run(json(), "run.json"); }
};

using shardbook::error_of;
std::string error_of(const std::string& text) {
  return error_of([&] { read_run(text, "run.json"); });
}

TEST(Table, ARowShowsEveryMeasuredValue) {
  const ProgramRun run = Sample{}.read();
  const std::string text = format_table({run}, kUtf8);
  expect_text(text, {"02_ddp  threads ×2  ✓ 3.1e-07  ✓ 3.2 MiB  ✓ 1.5 MiB  -\n",
                     "All 3 claims hold.\n"});
  EXPECT_EQ(count_claims({run}).failed, 0);
  EXPECT_EQ(count_claims({run}).measured, 3);
}

TEST(Table, WhatWasNotPredictedGetsNoTick) {
  const ProgramRun run =
      Sample{.bytes = R"([{"predicted": null, "counted": 3355440},
                          {"predicted": 3355440, "counted": 3355440}])",
             .held = R"([{"gradient": {"predicted": null,
                                       "counted": 1572864}}])",
             .claims = R"({"numbers": "passed", "bytes": "not predicted",
                           "memory": "not predicted",
                           "time": "no closed form"})"}
          .read();
  const std::string text = format_table({run}, kAscii);
  expect_text(text, {"ok 3.1e-07", "3.2 MiB"});
  EXPECT_EQ(text.find("ok 3.2 MiB"), std::string::npos) << text;
  expect_text(text, {"1.5 MiB"});
  EXPECT_EQ(text.find("ok 1.5 MiB"), std::string::npos) << text;
  EXPECT_EQ(count_claims({run}).failed, 0);
  EXPECT_EQ(count_claims({run}).measured, 1);
}

TEST(Table, AsciiTerminalsGetWords) {
  const ProgramRun run = Sample{}.read();
  const std::string text = format_table({run}, kAscii);
  expect_text(text, {"threads x2  ok 3.1e-07"});
  for (const char c : text) EXPECT_GE(c, 0) << text;
}

TEST(Table, NoDifferenceIsCalledExact) {
  const ProgramRun run = Sample{.max_rel = "0"}.read();
  EXPECT_EQ(run.numbers.value, "exact");
}

TEST(Table, FailedBytesNameRankAndBothCounts) {
  const ProgramRun run =
      Sample{.bytes = R"([{"predicted": 64, "counted": 64},
                          {"predicted": 64, "counted": 96}])",
             .claims = R"({"numbers": "passed", "bytes": "failed"})"}
          .read();
  EXPECT_EQ(count_claims({run}).failed, 1);
  const std::string text = format_table({run}, kUtf8);
  expect_text(text, {"✗ 96 B",
                     "1 of 2 claims failed:\n✗ 02_ddp, threads ×2: bytes: "
                     "rank 1: 96 B counted, 64 B predicted\n"});
}

TEST(Table, FailedMemoryNamesTheKind) {
  const ProgramRun run =
      Sample{.held = R"([{"gradient": {"predicted": 8, "counted": 9}}])",
             .claims = R"({"memory": "failed"})"}
          .read();
  EXPECT_EQ(run.memory.failure, "rank 0 gradient: 9 B counted, 8 B predicted");
}

TEST(Table, FailedNumbersNameTheTolerance) {
  const ProgramRun run =
      Sample{.max_rel = "null", .claims = R"({"numbers": "failed"})"}.read();
  EXPECT_EQ(run.numbers.failure,
            "the largest relative difference to one device is not a number, "
            "allowed is 1.0e-05");
}

TEST(Table, AStatedTotalReplacesTheSumOfKinds) {
  const ProgramRun run =
      Sample{.peak = R"([{"gradient": {"simulated": 8, "counted": 8},
                            "activation": {"counted": 8},
                            "total": {"counted": 12}}])"}
          .read();
  EXPECT_EQ(run.peak_bytes, 12);
}

Sample with_step(const std::string& closed_form, const std::string& counted) {
  return Sample{.virtual_run = R"({"cluster": "dgx-a100", "idle_share": 0.25,
                    "step_s": {"closed_form": )" +
                               closed_form + R"(, "simulated": 0.0013,
                               "counted": )" +
                               counted + "}}"};
}

// A difference of a billionth is a failure. Without a closed form there is no
// claim, nor has a GPU a clock of virtual time; without a cluster, wall time is
// shown.
TEST(TableTime, IsJudgedByAClosedFormAlone) {
  const auto expect = [](const Sample& sample, Verdict verdict,
                         const std::string& value) {
    const ProgramRun run = sample.read();
    EXPECT_EQ(run.time.verdict, verdict);
    EXPECT_EQ(run.time.value, value);
    return run.time.failure;
  };
  expect(with_step("0.0013", "0.0013000000000001"), Verdict::kPassed,
         "1.30 ms");
  EXPECT_EQ(expect(with_step("0.0013", "0.0013000000027"), Verdict::kFailed,
                   "1.30 ms"),
            "a step of 0.0013000000027 s by the clock, 0.0013 s by the closed "
            "form");
  expect(with_step("null", "null"), Verdict::kNotMeasured, "1.30 ms");
  expect(Sample{}, Verdict::kNotMeasured, "41.2 ms");
}

TEST(Table, TheBusiestRankStandsForAll) {
  const ProgramRun run = Sample{.bytes = R"([{"predicted": 7, "counted": 7},
                          {"predicted": 9, "counted": 9},
                          {"predicted": 8, "counted": 8}])"}
                             .read();
  EXPECT_EQ(run.bytes.value, "9 B");
}

TEST(Table, WhatIsNotMeasuredMayBeMissing) {
  const ProgramRun run = read_run(
      R"({"chapter": "00_single_device", "claims": {},
          "options": {"world_size": 1, "backend": "threads"}})",
      "run.json");
  const std::string text = format_table({run}, kUtf8);
  expect_text(text, {"00_single_device  1 rank  -        -     -     -\n",
                     "No claim was measured."});
}

// Colours are for marks alone.
TEST(Table, ColoursOnlyWhereTheyAreAskedFor) {
  const ProgramRun passed = Sample{}.read();
  const ProgramRun failed = Sample{.claims = R"({"numbers": "failed"})"}.read();
  const std::string text =
      format_table({passed, failed}, marks_of(true, /*has_colours=*/true));
  const std::string plain = format_table({passed, failed}, kUtf8);
  expect_text(text, {"\033[32m✓\033[0m 3.1e-07", "\033[31m✗\033[0m 3.1e-07",
                     "\n\033[31m✗\033[0m 02_ddp, threads ×2: numbers: "});
  EXPECT_EQ(std::regex_replace(text, std::regex("\033\\[[0-9]*m"), ""), plain);
  EXPECT_EQ(plain.find('\033'), std::string::npos);
}

// ---- What simulated runs show.

ProgramRun simulated(const std::string& label, int world_size, double step_s,
                     double peak_bytes, double capacity_bytes) {
  ProgramRun run = Sample{.backend = "sim"}.read();
  run.label = label;
  run.world_size = world_size;
  run.setting = "gpt2";
  run.peak_bytes = peak_bytes;
  run.capacity_bytes = capacity_bytes;
  run.virtual_run.emplace();
  run.virtual_run->cluster = "dgx-v100";
  run.virtual_run->step_s.counted = step_s;
  run.virtual_run->idle_share = 0.125;
  run.virtual_run->links = {{"nvlink", 2.5e9}, {"pcie", 0}};
  return run;
}

TEST(TableBuys, SpeedUpsAreOverTheGroupsRunOnOneDevice) {
  const std::string text =
      format_table({simulated("One device", 1, 2, 4e9, 32e9),
                    simulated("DDP", 4, 0.5, 8e9, 32e9)},
                   kUtf8);
  expect_text(
      text,
      {"gpt2 on dgx-v100 (32 GB per device)\n"
       "   1  One device         2.00 s  1.00      4.0 GB  2.5 GB nvlink  "
       "12.5 %\n"
       "   4  DDP                500 ms  4.00      8.0 GB  2.5 GB nvlink  "
       "12.5 %\n"});
  EXPECT_EQ(text.find("PROOF"), std::string::npos) << text;
}

TEST(TableBuys, GroupsHaveYardsticksOfTheirOwn) {
  ProgramRun other = simulated("Naive", 2, 0.1, 1e9, 16e9);
  other.setting = "resnet50";
  const std::string text =
      format_table({simulated("One device", 1, 2, 4e9, 32e9), other}, kUtf8);
  expect_text(text, {"   2  Naive              100 ms  -  "});
}

TEST(TableBuys, WhatDoesNotFitSaysSo) {
  const std::string text =
      format_table({simulated("One device", 1, 2, 40e9, 32e9),
                    simulated("DDP", 4, 0.5, 32e9, 32e9)},
                   kUtf8);
  expect_text(text, {"(1.00)    40.0 GB!", "(4.00)    32.0 GB   "});
}

TEST(TableBuys, BytesOfAllLinksBearTheNameOfTheBusiest) {
  ProgramRun run = simulated("TP", 16, 2, 4e9, 32e9);
  run.virtual_run->links = {{"nvlink", 2.5e9}, {"network", 4e9}};
  expect_text(format_table({run}, kUtf8), {"  6.5 GB network  "});
  run.virtual_run->links.clear();
  expect_text(format_table({run}, kUtf8), {"  4.0 GB  -     12.5 %"});
}

TEST(TableBuys, TheCapacityIsTheRunsOrItsClusters) {
  const std::string on_cluster =
      R"({"cluster": "dgx-v100", "step_s": {"counted": 1}})";
  Sample sample{.virtual_run = on_cluster, .backend = "sim"};
  EXPECT_EQ(sample.read().capacity_bytes, 32e9);
  sample.more = R"("capacity_bytes": 5000, )";
  EXPECT_EQ(sample.read().capacity_bytes, 5000);
  EXPECT_EQ(Sample{}.read().capacity_bytes, 0);
}

TEST(Table, SaysWhatMostRunsHaveInCommon) {
  ProgramRun usual;
  usual.setting = "gpt-nano, f32, sgd";
  usual.samples = "24 x 64 tokens";
  usual.steps = 20;
  ProgramRun other = usual;
  other.steps = 6;
  const std::string common =
      "Trained here: gpt-nano, f32, sgd, 24 x 64 tokens, "
      "20 steps, unless the row says\notherwise.\n";
  expect_text(format_table({usual, usual, other}, kUtf8), {common});
  EXPECT_EQ(format_table({usual, other}, kUtf8).find("Trained here"),
            std::string::npos);
}

TEST(Table, BytesAreThoseOfAStep) {
  std::string text = Sample{}.json();
  text.replace(text.find("\"world_size\""), 0, "\"steps\": 5, ");
  EXPECT_EQ(read_run(text, "run.json").bytes.value, "655 KiB");
}

// ---- Sets of runs.

TEST(TableComparison, RowsOfOneNameArePairedAndComparedWithTheFirst) {
  ProgramRun a = simulated("DDP", 4, 0.5, 8e9, 32e9), b = a;
  ProgramRun only_a = simulated("FSDP", 4, 0.4, 4e9, 32e9);
  a.set = only_a.set = "a";
  b.set = "b";
  b.virtual_run->step_s.counted = 0.75;
  b.peak_bytes = 4e9;
  const std::string text = format_comparison({a, only_a, b});
  expect_text(text, {"DDP\n  a  500 ms         7.5 GiB",
                     "\n  b  750 ms (1.50)  3.7 GiB (0.50)"});
  EXPECT_LT(text.find(" b "), text.find("FSDP")) << text;
}

TEST(TableComparison, SingleRunsAreComparedWhateverTheirNames) {
  ProgramRun a = simulated("DDP", 4, 0.5, 8e9, 32e9);
  ProgramRun b = simulated("FSDP", 4, 0.25, 8e9, 32e9);
  a.set = "a";
  b.set = "b";
  EXPECT_EQ(compare_sets({a, b}).size(), 1u);
  expect_text(format_comparison({a, b}), {"FSDP\n  b  250 ms (0.50)"});
}

TEST(RunSet, AFolderNamesItsRuns) {
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  std::ofstream(folder + "/01.json") << Sample{}.json();
  std::ofstream(folder + "/rows.tsv")
      << "01.json\tSplit\t*DDP on two\t./shardbook run ddp -- --steps 5\n";
  const std::vector<ProgramRun> runs = read_run_set(folder).runs;
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(run_name(runs[0]), "DDP on two");
  EXPECT_TRUE(runs[0].is_in_overview);
  EXPECT_EQ(runs[0].title, "Split");
  EXPECT_EQ(runs[0].command, "./shardbook run ddp -- --steps 5");
  EXPECT_EQ(runs[0].set, std::filesystem::path(folder).filename().string());
  EXPECT_EQ(read_run_set(folder).remark, "");
  std::ofstream(folder + "/rows.tsv", std::ios::app)
      << "# Interrupted after 1 of 3 runs.\n";
  EXPECT_EQ(read_run_set(folder).runs.size(), 1u);
  EXPECT_EQ(read_run_set(folder).remark, "Interrupted after 1 of 3 runs.");
  std::ofstream(folder + "/rows.tsv") << "01.json\n";
  expect_error([&] { read_run_set(folder); }, {"has 1 columns"});
}

TEST(TableInput, MistakesAreSentences) {
  EXPECT_EQ(error_of("{\"chapter\": "),
            "run.json: no JSON: the first mistake is at byte 13");
  EXPECT_EQ(error_of("{\"chapter\": 1e999}"),
            "run.json: no JSON that can be read: a number is too large");
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  EXPECT_EQ(error_of(Sample{.chapter = deep}.json()),
            "run.json: lists and objects are nested more than 64 deep; give at "
            "most 64 levels");
  EXPECT_EQ(error_of("[1, 2]"), "run.json: a run has to be a JSON object");
  EXPECT_EQ(error_of("{}"), "run.json: chapter is missing");
  EXPECT_EQ(error_of(Sample{.chapter = "7"}.json()),
            "run.json: chapter is 7; it has to be a string");
  EXPECT_EQ(error_of(Sample{.world_size = "-2"}.json()),
            "run.json: options.world_size is -2; it has to be a whole number "
            "from 0 up");
  EXPECT_EQ(error_of(Sample{.world_size = "0"}.json()),
            "run.json: options.world_size is 0; it has to be from 1 to "
            "10000000");
  EXPECT_EQ(error_of(Sample{.claims = "null"}.json()),
            "run.json: claims is missing");
  EXPECT_EQ(error_of(Sample{.loss = R"({"first": "high"})"}.json()),
            "run.json: loss.first is \"high\"; it has to be a number");
  EXPECT_EQ(error_of(Sample{.bytes = R"([{"counted": 3}])"}.json()),
            "run.json: bytes[0] has no predicted number of bytes");
  EXPECT_EQ(error_of(Sample{.bytes = "{}"}.json()),
            "run.json: bytes is {}; it has to be a list with one element per "
            "rank");
  EXPECT_EQ(error_of(Sample{.virtual_run = "3"}.json()),
            "run.json: virtual is 3; it has to be an object or null");
  EXPECT_EQ(error_of(with_step("1", "-1").json()),
            "run.json: virtual.step_s.counted is -1; it has to be a number "
            "from 0 up");
  EXPECT_EQ(error_of(Sample{.virtual_run = R"({"timeline": {}})"}.json()),
            "run.json: virtual.timeline.world_size is missing");
  EXPECT_EQ(error_of(Sample{.virtual_run = R"({"links": [{}]})"}.json()),
            "run.json: virtual.links: link is missing");
  EXPECT_EQ(error_of(Sample{.peak = "[[3]]"}.json()),
            "run.json: peak_memory[0].0 has no counted number of bytes");
}

TEST(TableUnits, BytesNeverNeedFourDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1.0 KiB");
  EXPECT_EQ(format_bytes(12'897'485), "12.3 MiB");
  EXPECT_EQ(format_bytes(1'048'575), "1.0 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{119} << 30), "119 GiB");
}

}  // namespace
}  // namespace shardbook::table
