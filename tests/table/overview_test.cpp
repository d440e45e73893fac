// The tables that ./shardbook run prints, for the rows of chapters/rows.txt, with
// figures as wide as those of real runs.

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "chapters/pictures/text_table.h"
#include "chapters/table/table.h"
#include "tests/support/default_rows.h"
#include "tests/support/errors.h"
#include "tests/support/widths.h"
#include "tests/table/marks_support.h"

namespace shardbook::table {
namespace {

using pictures::text_table::align;
using pictures::text_table::wrap;

std::string option(const DefaultRow& row, const std::string& name) {
  std::istringstream words(row.options);
  std::string value;
  for (std::string word; words >> word;) {
    if (word == name) words >> value;
  }
  return value;
}

Claim passed(const std::string& value) { return {Verdict::kPassed, value, ""}; }

ProgramRun run_of(const DefaultRow& row) {
  ProgramRun run;
  run.chapter = row.chapter;
  run.label = row.label;
  run.is_in_overview = row.is_in_overview;
  run.backend = option(row, "--backend");
  run.world_size = std::max(1, std::atoi(option(row, "--world-size").c_str()));
  const std::string model = option(row, "--model");
  run.setting = (model[0] == '{' ? "gpt2 (n_embd 2048, n_head 16, n_layer 24, "
                                   "n_positions 65536)"
                                 : model) +
                ", bf16, adamw";
  const std::string image = option(row, "--image-size");
  run.samples = option(row, "--batch") +
                (image.empty() ? " x " + option(row, "--seq") + " tokens"
                               : " images of " + image + " x " + image);
  if (run.backend != "sim") {
    run.numbers = passed("8.9e-08");
    run.difference = 8.9e-8;
    run.bytes = run.memory = passed("10.2 MiB");
    run.time = passed("1.19 ms");
    return run;
  }
  run.title = row.title;
  run.peak_bytes = 106e9;
  run.capacity_bytes = 80e9;
  run.virtual_run.emplace();
  run.virtual_run->cluster = option(row, "--cluster");
  run.virtual_run->step_s.counted = 0.371;
  run.virtual_run->idle_share = 0.766;
  run.virtual_run->links = {{"network", 535e12}};
  return run;
}

std::vector<ProgramRun> default_runs() {
  std::vector<ProgramRun> runs;
  for (const DefaultRow& row : default_rows()) {
    runs.push_back(run_of(row));
    if (row.title != "Proof" && row.chapter == "00_single_device") {
      runs.back().virtual_run->step_s.counted = 422 * 0.371;
    }
  }
  return runs;
}

// What next, and where the pictures are, takes three more lines.
TEST(Overview, FitsSixtyLinesOfEightyColumns) {
  for (const bool is_utf8 : {false, true}) {
    for (const bool has_colours : {false, true}) {
      const std::string text =
          format_overview(default_runs(), marks_of(is_utf8, has_colours));
      EXPECT_LE(expect_fits_terminal(text), 57) << text;
      EXPECT_EQ(text.find(".."), std::string::npos) << text;
    }
  }
}

TEST(Overview, TheWholeTablesFitEightyColumnsAndCutNoName) {
  for (const Marks& marks : {kUtf8, kAscii}) {
    const std::string text = format_table(default_runs(), marks);
    EXPECT_GT(expect_fits_terminal(text), 100);
    EXPECT_EQ(text.find(".."), std::string::npos) << text;
  }
}

TEST(TableComparison, FitsEightyColumnsAndCutsNoName) {
  std::vector<ProgramRun> runs = default_runs();
  for (const ProgramRun& run : default_runs()) {
    runs.push_back(run);
    runs.back().set = "last-interrupted";
  }
  const std::string text = format_comparison(runs);
  EXPECT_GT(expect_fits_terminal(text), 200);
  EXPECT_EQ(text.find(".."), std::string::npos) << text;
}

TEST(Overview, EveryIdeaIsInIt) {
  std::vector<ProgramRun> runs = default_runs();
  const std::string text = format_overview(runs, kUtf8);
  for (const ProgramRun& run : runs) {
    // Several models are one idea
    const bool is_shown =
        run.title.rfind("Train ", 0) != 0 || run.title == "Train Llama 3.1 70B";
    if (!run.title.empty() && is_shown) {
      expect_text(text, {"\n" + run.title + ": "});
    }
  }
}

TEST(Overview, ProofsOfAChapterShareALine) {
  ProgramRun one = run_of(
      {"Proof", "03_zero_fsdp", "ZeRO-1", "--backend threads --world-size 2"});
  ProgramRun two = run_of(
      {"Proof", "03_zero_fsdp", "ZeRO-2", "--backend threads --world-size 4"});
  ProgramRun three = run_of({"Proof", "03_zero_fsdp", "FSDP, wrapped",
                             "--backend gloo --world-size 2"});
  two.difference = 1e-7;
  two.bytes.verdict = Verdict::kFailed;
  two.bytes.failure = "rank 1: 96 B counted, 64 B predicted";
  three.time.verdict = Verdict::kNotMeasured;
  std::string text = format_overview({one, two, three}, kUtf8);
  expect_text(text,
              {"\n03 ZeRO-1, ZeRO-2, FSDP  threads ×4, gloo ×2  1.0e-07  "
               "✗ 10 of 11\n",
               "1 of 11 claims failed:\n✗ ZeRO-2, threads ×4: bytes: rank 1: "
               "96 B counted, 64 B predicted\n"});
  // Several ways of one idea, and names that do not fit
  one.label = "Experts: E";
  two.label = "Experts: E + D";
  expect_text(format_overview({one, two}, kUtf8), {"\n03 Experts, 2 ways  "});
  two.label = std::string(60, 'a');
  expect_text(format_overview({one, two}, kUtf8), {"\n03 Experts, and more  "});
  one.label = std::string(61, 'a');
  expect_text(format_overview({one, two}, kUtf8), {"\n03 zero_fsdp, 2 ways  "});
}

// PipeDream computes with old weights: it may be faster, and learns otherwise.
TEST(OtherTraining, IsMarkedAndExplainedWhereverItsNameIsShown) {
  ProgramRun plain = run_of({"Order the work", "06_1f1b", "1F1B",
                             "--backend sim --world-size 4 --model gpt2 "
                             "--batch 8 --seq 512 --cluster dgx-a100"});
  ProgramRun old = plain;
  old.label = "PipeDream-2BW";
  old.other_training = "weights one update old";
  plain.is_in_overview = old.is_in_overview = true;
  ProgramRun proof = old;
  proof.backend = "threads";
  std::vector<ProgramRun> runs = {plain, old, proof}, sets = {plain, old};
  sets[0].set = "before";
  const std::string legend =
      "\n*: other numbers than one device's (PipeDream-2BW: weights one update "
      "old).\n";
  for (const std::string& text :
       {format_table(runs, kUtf8), format_overview({plain, old}, kAscii),
        format_overview({proof}, kUtf8), format_comparison(sets),
        format_compared({plain, old}, kUtf8)}) {
    expect_text(text, {"PipeDream-2BW*", legend});
    expect_fits_terminal(text);
    EXPECT_EQ(text.find("1F1B*"), std::string::npos) << text;
  }
  runs = {plain, plain};
  for (const std::string& text :
       {format_table(runs, kUtf8), format_overview(runs, kUtf8),
        format_comparison(runs), format_compared(runs, kUtf8)}) {
    EXPECT_EQ(text.find('*'), std::string::npos) << text;
  }
}

TEST(TextTable, LinesBreakAtSpacesButKeepUnits) {
  EXPECT_EQ(wrap("one two three", 2, 8), "one two\n  three\n");
  EXPECT_EQ(wrap("  one 2 GB", 4, 8), "  one\n    2 GB\n");
  EXPECT_EQ(wrap("unbreakable", 1, 5), "unbre\n akab\n le\n");
}

TEST(TextTable, NamesAreCutWhereATableIsTooWide) {
  EXPECT_EQ(align({{"a long name", "\033[32m✓\033[0m x"}, {"b", "y"}}, 14),
            "a long ..  \033[32m✓\033[0m x\nb          y\n");
}

}  // namespace
}  // namespace shardbook::table
