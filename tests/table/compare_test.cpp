// The table of ./shardbook compare: one unit per column, one yardstick.

#include "chapters/table/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "chapters/pictures/text_table.h"
#include "tests/support/errors.h"
#include "tests/table/marks_support.h"

namespace shardbook::table {
namespace {

// A run as ./shardbook compare reads it; a test changes what it is about.
ProgramRun compared_run(const std::string& label, int ranks, double step_s,
                        double peak_bytes, double sent_bytes) {
  ProgramRun run;
  run.title = kComparedTitle;
  run.label = label;
  run.backend = "sim";
  run.world_size = ranks;
  run.setting = "gpt2, f32, adamw";
  run.samples = "32 x 512 tokens";
  run.steps = 3;
  run.peak_bytes = peak_bytes;
  run.sent_bytes = 3 * sent_bytes;
  run.capacity_bytes = 80e9;
  run.bytes.verdict = Verdict::kPassed;
  run.virtual_run.emplace();
  run.virtual_run->cluster = "dgx-a100";
  run.virtual_run->step_s.counted = step_s;
  run.virtual_run->idle_share = ranks == 1 ? 0 : 0.0194;
  return run;
}

ProgramRun trained_run(const std::string& label, int ranks, double wall_s) {
  ProgramRun run = compared_run(label, ranks, 0.01, 32e6, 1.5e6);
  run.backend = "threads";
  run.loss = {"5.57", "3.65"};
  run.numbers.verdict = run.memory.verdict = Verdict::kPassed;
  run.wall_step_s = wall_s;
  return run;
}

std::vector<ProgramRun> compared_runs() {
  return {compared_run("one device", 1, 1.1924, 17.86e9, 0),
          compared_run("ddp", 4, 0.3271, 6.08e9, 746.6e6),
          compared_run("1f1b --micro-batches 16", 4, 0.4153, 45e9, 80.5e6)};
}

std::string text_of(const std::vector<ProgramRun>& runs,
                    const Marks& marks = kUtf8) {
  const std::string text = format_compared(runs, marks);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(pictures::text_table::width(line), 80u) << line;
  }
  return text;
}

bool has_column(const std::vector<ProgramRun>& runs, const std::string& name) {
  const auto columns = compare_runs(runs, kUtf8).columns;
  return std::any_of(columns.begin(), columns.end(),
                     [&](const auto& column) { return column.name == name; });
}

TEST(Compare, EachColumnHasOneUnit) {
  expect_text(
      text_of(compared_runs()),
      {"gpt2, f32, adamw, 32 x 512 tokens on dgx-a100 (80 GB per device)\n\n"
       "                         devices  step  speed-up   peak   sent  idle\n"
       "                                    ms               GB     MB     %\n"
       "one device                     1  1192      1.00  17.86      0   0.0\n"
       "ddp                            4   327      3.65   6.08  746.6   1.9\n"
       "1f1b --micro-batches 16        4   415      2.87  45.00   80.5   1.9\n"
       "\n",
       "step: virtual time on dgx-a100. speed-up: over one device. peak: ",
       "All 3 claims hold.\n"});
}

// A unit may be small for the largest value, but never large for the smallest.
TEST(Compare, TheSmallestValueChoosesTheUnit) {
  std::vector<ProgramRun> runs = compared_runs();
  runs[0].virtual_run->step_s.counted = 5305;
  runs[1].virtual_run->step_s.counted = 0.9;
  runs[2].virtual_run->step_s.counted = 12.3;
  runs[2].sent_bytes = 3 * 64e3;
  const auto columns = compare_runs(runs, kUtf8).columns;
  EXPECT_EQ(columns[1].unit, "s");
  EXPECT_EQ(columns[1].cells[1], "0.90");
  EXPECT_EQ(columns[4].unit, "KB");
  EXPECT_EQ(columns[4].cells[1], "746600");
}

TEST(Compare, WhatDoesNotFitIsMarked) {
  std::vector<ProgramRun> runs = compared_runs();
  runs[2].peak_bytes = 106e9;
  expect_text(text_of(runs),
              {"1.00   17.86 ", "  (2.87)  106.00!", "! does not fit",
               "in brackets if one of\nthe two does not fit in memory"});
  runs[0].peak_bytes = 200e9;
  expect_text(text_of(runs), {"(1.00)", "(3.65)"});
}

TEST(Compare, RunsThatTrainedShowLossAndClaims) {
  std::vector<ProgramRun> runs = {trained_run("one device", 1, 0.02),
                                  trained_run("ddp", 4, 0.01)};
  expect_text(text_of(runs),
              {"  loss  claims\n", "  3.65   ✓ 3/3\n", "All 6 claims hold."});
  runs[1].bytes = {Verdict::kFailed, "2 B", "rank 1: 2 B counted"};
  expect_text(text_of(runs), {"  3.65   ✗ 2/3\n", "1 of 6 claims failed:\n"});
  expect_text(text_of(runs, kAscii), {"ok 3/3\n", "no 2/3\n"});
  expect_text(format_compared(runs, marks_of(true, /*has_colours=*/true)),
              {"   \033[32m✓\033[0m 3/3\n", "   \033[31m✗\033[0m 2/3\n"});
  EXPECT_FALSE(has_column(compared_runs(), "claims"));
}

// A GPU keeps no virtual time, and gloo none either: all rows show wall time.
TEST(Compare, WithoutVirtualTimeOfAllStepsAreWallTime) {
  for (const bool is_gpu : {true, false}) {
    std::vector<ProgramRun> runs = {trained_run("one device", 1, 0.02),
                                    trained_run("ddp", 4, 0.008)};
    if (is_gpu) {
      runs[0].device = runs[1].device = "cuda";
    } else {
      runs[1].virtual_run.reset();
      runs[1].capacity_bytes = 0;
    }
    expect_text(text_of(runs), {"20.00      1.00", "8.00      2.50",
                                "step: wall time on this machine."});
    EXPECT_FALSE(has_column(runs, "idle"));
  }
}

TEST(Compare, LongLabelsHaveLinesOfTheirOwn) {
  std::vector<ProgramRun> runs = compared_runs();
  runs[2].label =
      "zero --strategy zero3 --prefetch-bucket-size 1000 --recompute";
  expect_text(text_of(runs), {runs[2].label + "\n            ", "\nddp   "});
  for (int i = 0; i < 3; ++i) runs[2].label += " --partition 14,13,13,10";
  text_of(runs);
}

// Other work per step has no speed-up, and is named.
TEST(Compare, AnotherTrainingHasNoSpeedUp) {
  std::vector<ProgramRun> runs = compared_runs();
  runs[1].samples = "64 x 512 tokens";
  runs[2].virtual_run->cluster = "selene";
  const std::string text = text_of(runs);
  expect_text(text, {"  327         -   ", "2.87",
                     "ddp: gpt2, f32, adamw, 64 x 512 tokens on dgx-a100",
                     "1f1b --micro-batches 16: gpt2, f32, adamw, 32 x 512 "
                     "tokens on selene"});
}

TEST(Compare, WithoutOneDeviceNothingIsASpeedUp) {
  std::vector<ProgramRun> runs = compared_runs();
  runs.erase(runs.begin());
  EXPECT_FALSE(has_column(runs, "speed-up"));
  text_of(runs);
}

// A rank that computes for a whole step.
sim::StepView step_of(double step_s) {
  sim::StepView view;
  view.step_s = step_s;
  sim::TimelineEvent event;
  event.queue = "compute";
  event.category = "forward";
  event.end_s = step_s;
  view.groups.push_back({{0}, {}});
  view.groups.back().timeline.events = {event};
  return view;
}

// One device is left out of the timelines: the others would be too short.
TEST(Compare, ThePageHasTheTableAndAllTimelinesOnOneAxis) {
  std::vector<ProgramRun> runs = compared_runs();
  for (ProgramRun& run : runs) {
    run.virtual_run->timeline = step_of(run.virtual_run->step_s.counted);
  }
  const std::string page = report_html(runs);
  expect_text(page, {"<section id=\"compared\">", "<figure class=\"scatter\">",
                     "<td>746.6</td>", "Step <span class=\"unit\">ms</span>",
                     "ddp ends its step first, after 327 ms; 1f1b "
                     "--micro-batches 16 last, after 415 ms"});
  const std::string timelines = page.substr(
      page.find("<figure class=\"timeline\">"),
      page.find("id=\"compared\"") - page.find("<figure class=\"timeline\">"));
  expect_text(timelines, {"data-run=\"1\"", "data-run=\"2\""});
  EXPECT_FALSE(has_text(timelines, "data-run=\"0\"")) << timelines;
  EXPECT_FALSE(has_text(page, "id=\"buys\"")) << "a second table";
  runs[1].title = "";
  EXPECT_FALSE(has_text(report_html(runs), "id=\"compared\""));
}

TEST(Compare, OnlyItsOwnRunsGetItsTable) {
  std::vector<ProgramRun> runs = compared_runs();
  EXPECT_TRUE(are_compared(runs));
  runs[1].title = "Split the batch";
  EXPECT_FALSE(are_compared(runs));
  EXPECT_FALSE(are_compared({}));
}

}  // namespace
}  // namespace shardbook::table
