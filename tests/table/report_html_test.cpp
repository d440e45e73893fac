#include <gtest/gtest.h>

#include "chapters/common/run/exit_status.h"
#include "chapters/pictures/svg.h"
#include "chapters/table/table.h"
#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::table {
namespace {

ProgramRun one_run() {
  ProgramRun run;
  run.chapter = "02_ddp";
  run.backend = "threads";
  run.world_size = 2;
  return run;
}

RankBill bill(double predicted, double counted) {
  RankBill bill;
  bill.sent = {predicted, counted};
  return bill;
}

int count(const std::string& text, const std::string& words) {
  int found = 0;
  for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos;
       at += words.size()) {
    ++found;
  }
  return found;
}

sim::TimelineEvent event(const char* category, double begin_s, double end_s) {
  sim::TimelineEvent event;
  event.category = category;
  event.queue = "compute";
  event.begin_s = begin_s;
  event.end_s = end_s;
  return event;
}

TEST(ReportHtml, NamesAreText) {
  ProgramRun run = one_run();
  run.chapter = "<script>alert(\"&\")</script>";
  const std::string page = report_html({run});
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  expect_text(page, {"&lt;script&gt;alert(&quot;&amp;&quot;)"});
}

TEST(ReportHtml, ARemarkFollowsTheSummary) {
  const std::string page = report_html({one_run()}, "Interrupted <early>.\n");
  expect_text(page, {">Interrupted &lt;early&gt;."});
}

// A run of two ranks with a step of three seconds.
ProgramRun with_timeline() {
  ProgramRun run = one_run();
  run.virtual_run.emplace();
  sim::StepView& view = run.virtual_run->timeline.emplace();
  view.world_size = 2;
  view.step_s = 3;
  sim::RankGroup group;
  group.ranks = {0, 1};
  group.timeline.events = {event("forward", 0, 1), event("bubble", 1, 2),
                           event("exposed", 2, 2.25)};
  view.groups = {group};
  return run;
}

TEST(ReportHtml, DataAreLettersThatCannotEndTheScript) {
  ProgramRun run = with_timeline();
  run.virtual_run->timeline->groups[0].timeline.events[0].name = "</script>";
  const std::string page = report_html({run});
  const std::string mark = "<script type=\"text/plain\" id=\"data-0\">";
  ASSERT_EQ(count(page, mark), 1);
  const std::size_t begin = page.find(mark) + mark.size();
  const std::size_t end = page.find('<', begin);
  EXPECT_EQ(page.compare(end, 10, "</script>\n"), 0);
  const std::string data = page.substr(begin, end - begin);
  EXPECT_EQ(data.size() % 4, 0u);
  EXPECT_EQ(data.substr(0, 2), "eJ") << "no deflated data";
}

TEST(ReportHtml, WithoutVirtualTimeThereIsNoTimeline) {
  const std::string page = report_html({one_run()});
  EXPECT_EQ(page.find("<figure class=\"timeline\""), std::string::npos);
  EXPECT_EQ(page.find("id=\"data-"), std::string::npos);
}

TEST(ReportHtml, RanksWithOneBillShareRows) {
  ProgramRun run = one_run();
  run.ranks = {bill(1234567, 1234567), bill(8, 9), bill(1234567, 1234567)};
  const std::string page = report_html({run});
  EXPECT_EQ(count(page, "scope=\"rowgroup\">"), 2);
  expect_text(page, {">ranks 0, 2, each<", "<td>1,234,567 B</td>"});
  EXPECT_EQ(count(page, "aria-label=\"different\""), 1);
}

TEST(ReportHtml, AnEmptyReportIsAPage) {
  expect_text(report_html({}), {"0 runs;", "no claim was measured."});
}

TEST(ReportHtml, SharesOfALaneAddUpToTheStep) {
  const std::string page = report_html({with_timeline()});
  EXPECT_NE(page.find(">busy 33.4 % + bubble 33.3 % + exposed communication "
                      "8.3 % + rest 25.0 %</span>"),
            std::string::npos)
      << page.substr(page.find("class=\"shares\""), 200);
  expect_text(page, {"<b>ranks 0-1</b>", "</svg>idle</li>"});
}

TEST(ReportHtml, RunsThatAreNotShownAreCounted) {
  ProgramRun run = with_timeline();
  run.virtual_run->timeline->world_size = 64;
  expect_text(report_html({run}), {"62 more ranks are not shown."});
}

// ---- Proof.

ProgramRun proved(Verdict verdict) {
  ProgramRun run = one_run();
  run.bytes = {verdict, "3.0 KiB", "rank 0: 96 B counted, 64 B predicted"};
  run.sent_bytes = 3072;
  run.time = {Verdict::kPassed, "1 us", ""};
  return run;
}

TEST(ReportProof, IsOneLineThatOpensIfAClaimFails) {
  const std::string holds =
      report_html({proved(Verdict::kPassed), proved(Verdict::kPassed)});
  expect_text(holds, {"<details><summary><h2>Proof: 2 of 2 runs hold</h2>",
                      "all 4 claims", "all 4 claims hold."});
  const std::string fails =
      report_html({proved(Verdict::kPassed), proved(Verdict::kFailed)});
  expect_text(fails, {"<details open><summary><h2>Proof: 1 of 2 runs hold</h2>",
                      "3 of 4 claims", "1 of 4 claims failed."});
}

TEST(ReportProof, NumbersOfAColumnShareAUnit) {
  ProgramRun large = proved(Verdict::kPassed);
  large.sent_bytes = 5 * 1024 * 1024;
  const std::string page = report_html({proved(Verdict::kPassed), large});
  expect_text(page, {">Sent <span class=\"unit\">KiB</span></th>",
                     "</span> 3.00</td>", "</span> 5120</td>"});
}

// ---- What simulated runs show.

ProgramRun simulated(const std::string& label, int world_size, double step_s,
                     double peak_bytes) {
  ProgramRun run = one_run();
  run.label = label;
  run.backend = "sim";
  run.world_size = world_size;
  run.setting = "gpt2";
  run.peak_bytes = peak_bytes;
  run.capacity_bytes = 32e9;
  run.virtual_run.emplace();
  run.virtual_run->cluster = "dgx-v100";
  run.virtual_run->step_s.counted = step_s;
  return run;
}

TEST(ReportBuys, ModelsOfDifferentKindsDoNotShareAxes) {
  ProgramRun other = simulated("Naive", 2, 0.1, 3e9);
  other.setting = "resnet50";
  ProgramRun more = other;
  more.label = "Splits";
  const std::string page =
      report_html({simulated("One device", 1, 2, 40e9),
                   simulated("DDP", 4, 0.5, 20e9), other, more});
  EXPECT_EQ(count(page, "<section class=\"group\" id="), 2);
  EXPECT_EQ(count(page, "<figure class=\"scatter\">"), 1);
  // The longest step of each group fills its bar.
  EXPECT_EQ(count(page, "<rect class=\"time\" width=\"1000.0\""), 3);
}

TEST(ReportBuys, WhatDoesNotFitIsMarked) {
  const ProgramRun fits = simulated("DDP", 4, 0.5, 32e9);
  const std::string page = report_html({fits, simulated("DDP", 4, 0.5, 40e9)});
  EXPECT_EQ(count(page, "<span class=\"over\">does not fit</span> 40<"), 1);
  EXPECT_EQ(report_html({fits, fits}).find("<span class=\"over\">"),
            std::string::npos);
}

TEST(ReportBuys, EveryColumnHasADefinitionAndAUnit) {
  ProgramRun run = simulated("DDP", 8, 0.5, 20e9);
  run.virtual_run->links = {{"nvlink", 12e9}, {"network", 0}};
  const std::string page =
      report_html({simulated("One device", 1, 2, 40e9), run});
  EXPECT_EQ(count(page, "<th scope=\"col\" title=\"\""), 0);
  for (const char* head : {"Step <span class=\"unit\">ms</span>",
                           "Peak memory <span class=\"unit\">GB</span>",
                           "Sent over nvlink <span class=\"unit\">GB</span>",
                           "Idle <span class=\"unit\">%</span>"}) {
    EXPECT_EQ(count(page, std::string(">") + head + "</th>"), 1) << head;
  }
  expect_text(page, {"<td>12</td>", "<dt>Sent over</dt><dd>"});
  EXPECT_EQ(page.find("Sent over network"), std::string::npos);
}

TEST(ReportBuys, StandsBeforeTheProofAndMarksWhatFailed) {
  ProgramRun run = simulated("DDP", 8, 0.5, 20e9);
  run.bytes = proved(Verdict::kFailed).bytes;
  const std::string page = report_html({proved(Verdict::kPassed), run});
  EXPECT_LT(page.find("<h2>What it buys</h2>"), page.find("<h2>Proof: 1 of 1"));
  EXPECT_EQ(count(page, "aria-label=\"failed\">\u2717</span> <a href"), 1);
}

TEST(ReportBuys, NamesSayWhatARunIs) {
  ProgramRun run = simulated("DDP", 8, 0.5, 20e9), other = run;
  run.title = "Split the batch";
  other.title = "Shard what every rank keeps";
  const std::string page = report_html({run, other});
  EXPECT_EQ(count(page, "<h4>DDP, sim \u00d78</h4>"), 2);
  for (const ProgramRun& each : {run, other}) {
    // In the contents, above its table and above its runs
    EXPECT_EQ(count(page, ">" + each.title + "<"), 3) << each.title;
  }
}

// ---- The first screen.

ProgramRun pipeline(const std::string& label, double step_s, double bubble_s,
                    double peak_bytes) {
  ProgramRun run = simulated(label, 4, step_s, peak_bytes);
  run.virtual_run->bubble_s = bubble_s;
  run.virtual_run->timeline = with_timeline().virtual_run->timeline;
  run.virtual_run->timeline->step_s = step_s;
  return run;
}

std::string first_screen(const std::vector<ProgramRun>& runs) {
  const std::string page = report_html(runs);
  const std::size_t begin = page.find("<section id=\"first\"");
  if (begin == std::string::npos) return "";
  return page.substr(begin, page.find("</section>", begin) - begin);
}

TEST(ReportFirst, TwoPipelinesThatDifferMostShareAnAxis) {
  std::vector<ProgramRun> runs = {
      pipeline("GPipe", 1, 0.2, 48e9), pipeline("1F1B", 1, 0.2, 16e9),
      pipeline("ZB-H1", 0.9, 0.09, 16e9), pipeline("late", 0.5, 0, 1e9),
      simulated("DDP", 8, 0.5, 20e9)};
  // A view of several steps cannot be compared.
  runs[3].virtual_run->timeline->step_s = 2;
  runs[4].setting = "resnet50";
  const std::string first = first_screen(runs);
  expect_text(first,
              {"<b>late is the fastest that fits: 500 ms</b>",
               "<b>ZB-H1 spends 10 % of its step in bubbles, GPipe 20 %</b>"});
  EXPECT_EQ(count(first, "<svg class=\"lane compute\""), 2);
  EXPECT_EQ(count(first, "data-run=\"0\""), 1);
  EXPECT_EQ(count(first, "data-run=\"2\""), 1);
}

TEST(ReportFirst, BeginsWhereTheStrategyDecidesWhatFitsAndNamesTheWorkload) {
  std::vector<ProgramRun> runs = {
      simulated("DDP", 4, 0.5, 8e9),       simulated("DDP", 8, 0.3, 4e9),
      simulated("DDP, all", 8, 2.3, 36e9), simulated("ZeRO-3", 8, 2.2, 15e9),
      pipeline("GPipe", 1, 0.2, 30e9),     pipeline("ZB-H1", 0.9, 0.09, 16e9)};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].title = i < 2 ? "Split the batch" : i < 4 ? "Shard" : "Order";
    if (i >= 2) runs[i].setting = i < 4 ? "gpt2-xl" : "gpt2-large";
    runs[i].samples = "16 x 1024 tokens";
  }
  expect_text(
      first_screen(runs),
      {"<b>ZeRO-3 is the fastest that fits: 2.20 s</b> Shard: gpt2-xl, "
       "16 x 1024 tokens on dgx-v100 (32 GB per device). <span>Upwards: ",
       "<b>ZB-H1 spends 10 % of its step in bubbles, GPipe 20 %</b> "
       "gpt2-large, 16 x 1024 tokens on dgx-v100 (32 GB per device). "
       "<span>One step of each"});
  // Without such a group, the first one is drawn
  runs[2].peak_bytes = 31e9;
  expect_text(first_screen(runs), {"</b> Split the batch: gpt2, 16 x"});
}

TEST(ReportFirst, AnotherTrainingIsMarkedAndDoesNotWin) {
  std::vector<ProgramRun> runs = {pipeline("1F1B", 1, 0.2, 16e9),
                                  pipeline("ZB-H1", 0.9, 0.1, 17e9),
                                  pipeline("2BW", 0.5, 0, 15e9)};
  runs[2].other_training = "weights one update old";
  const std::string note =
      "*: other numbers than one device's (2BW: weights one update old).";
  const std::string first = first_screen(runs), page = report_html(runs);
  expect_text(first, {"<b>ZB-H1 is the fastest that fits: 900 ms; 1F1B needs "
                      "the least memory: 16 GB</b>",
                      "<span>2BW*</span>", note, "2BW*, sim \u00d74"});
  expect_text(page.substr(page.find("id=\"buys\"")), {">2BW*</a>", note});
  runs[0].peak_bytes = runs[1].peak_bytes = 40e9;
  expect_text(first_screen(runs),
              {"<b>None of the runs without * fits in memory</b>"});
}

TEST(ReportFirst, AFewRunsAreAllDrawn) {
  const std::string page = report_html(
      {simulated("One device", 1, 9, 30e9), pipeline("A", 2, 0, 20e9),
       pipeline("B", 1, 0, 20e9), pipeline("C", 3, 0, 20e9)});
  expect_text(page, {"<b>B ends its step first, after 1.00 s; C last, after "
                     "3.00 s</b>"});
  const std::string first = page.substr(0, page.find("id=\"buys\""));
  EXPECT_EQ(count(first, "<svg class=\"lane compute\""), 3);
  expect_text(first, {"<a href=\"#run-2\">B, sim \u00d74</a>"});
}

TEST(ReportFirst, SetsAreComparedByTheLineThatChangedMost) {
  std::vector<ProgramRun> runs = {
      pipeline("A", 2, 0, 20e9), pipeline("B", 1, 0, 20e9),
      pipeline("A", 2, 0, 20e9), pipeline("B", 1.5, 0, 20e9)};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].set = i < 2 ? "old" : "new";
  }
  expect_text(report_html(runs),
              {"<b>old: B, sim \u00d74 ends its step first, after 1.00 s; "
               "new: B, sim \u00d74 last, after 1.50 s</b>",
               "<td>1.50 (1.50)</td>"});
}

TEST(ReportFirst, ARunAloneIsOpenAndHasNoTables) {
  const std::string page = report_html({pipeline("A", 2, 0, 20e9)});
  expect_text(page, {"<details class=\"run\" id=\"run-0\" open>"});
  for (const char* part : {"id=\"first\"", "id=\"buys\"", "id=\"proof\""}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
}

TEST(ReportHtml, ARunShowsItsCommandAndItsPage) {
  ProgramRun run = one_run();
  run.command = "./shardbook run ddp -- --trace 'a<b'";
  const ReportLinks links = {"..", ""};
  const std::string page = report_html({run}, "", links);
  expect_text(page, {"<code>./shardbook run ddp -- --trace 'a&lt;b'</code>",
                     "href=\"../chapters/02_ddp/README.md\""});
  // Nothing is linked that may not be there
  EXPECT_EQ(report_html({run}).find("README.md"), std::string::npos);
  run.chapter = "local_sgd";
  EXPECT_EQ(report_html({run}, "", links).find("README.md"), std::string::npos);
}

TEST(ReportHtml, LinksToTheExplorerOrSaysHowToGetIt) {
  const auto page = [](const ReportLinks& links) {
    return report_html({one_run()}, "", links);
  };
  const std::string link =
      "<a href=\"../explorer/index.html\">the explorer</a>";
  const std::string command = "<code>./shardbook explore</code>";
  const std::string with = page({"..", "../explorer"}),
                    without = page({"..", ""});
  EXPECT_EQ(count(with, link), 1);
  EXPECT_EQ(count(with, command), 0);
  EXPECT_EQ(count(without, "explorer/index.html"), 0);
  EXPECT_EQ(count(without, command), 1);
  EXPECT_EQ(count(page({}), command), 0);
}

// ---- A sweep over split sizes.

const char* const kSweepRun = R"({"chapter": "04_model_parallel",
  "options": {"backend": "threads", "world_size": 2}, "claims": {},
  "sweep": {"repeats": 5, "cluster": "kaggle-t4x2",
    "single": {"variant": "single", "virtual_s": 0.8,
               "wall_s": {"mean": 2.0, "sd": 0.1, "fastest": 1.9}},
    "model_parallel": {"variant": "model_parallel", "virtual_s": 0.9,
                       "wall_s": {"mean": 2.5, "sd": 0, "fastest": 2.5}},
    "pipeline": [
      {"split_size": 2, "virtual_s": 0.7,
       "wall_s": {"mean": 1.5, "sd": 0.1, "fastest": 1.4}},
      {"split_size": 6, "virtual_s": 0.4,
       "wall_s": {"mean": 1.25, "sd": 0.25, "fastest": 1.1}},
      {"split_size": 12, "virtual_s": 0.5,
       "wall_s": {"mean": 1.75, "sd": 0.1, "fastest": 1.6}}]}})";

TEST(ReportSweep, ShowsTheBestSplitSizeBesideOneDeviceAndTheNaiveSchedule) {
  const ProgramRun run = read_run(kSweepRun, "run.json");
  ASSERT_TRUE(run.sweep.has_value());
  EXPECT_EQ(run.sweep->pipelined.size(), 3u);
  const std::string page = report_html({run});
  EXPECT_EQ(count(page, "<figure class=\"sweep\">"), 2);
  EXPECT_EQ(count(page, ">splits of 6</span>"), 2);
  EXPECT_EQ(count(page, ">splits of 2</span>"), 0);
  expect_text(page, {"1.25 s \u00b1 250 ms"});
  // The naive bar is the longest of its clock, and nothing deviates from it.
  expect_text(page,
              {"M1000.0 5H1000.0", "splits of 2: 700 ms; splits of 6: 400 ms"});
}

TEST(ReportSweep, VirtualTimesAloneAreEnough) {
  std::string text = kSweepRun;
  for (std::size_t at; (at = text.find("\"wall_s\"")) != std::string::npos;) {
    text.replace(at, 8, "\"none\"");
  }
  const std::string page = report_html({read_run(text, "run.json")});
  EXPECT_EQ(count(page, "<figure class=\"sweep\">"), 1);
}

TEST(ReportSweep, ARunWithoutOneHasNone) {
  EXPECT_EQ(report_html({one_run()}).find("class=\"sweep\""),
            std::string::npos);
}

TEST(ReportSweep, MistakesAreSentences) {
  const auto error = [](const std::string& from, const std::string& to) {
    std::string text = kSweepRun;
    text.replace(text.find(from), from.size(), to);
    return error_of([&] { read_run(text, "run.json"); });
  };
  expect_text(error("\"repeats\": 5", "\"repeats\": \"5\""), {"repeats"});
  expect_text(error("\"virtual_s\": 0.4", "\"virtual_s\": -1"),
              {"sweep.pipeline: virtual_s"});
}

// ---- The load of each expert.

TEST(ReportLoads, AreColumnsPerLayerInTheOrderOfTheRun) {
  const std::string text =
      R"({"chapter": "13_moe", "options": {"backend": "threads",
          "world_size": 2}, "claims": {},
          "expert_loads": {"h.9": [3, 1, 0, 0], "h.10": [2, 2, 2, 2]}})";
  const ProgramRun run = read_run(text, "run.json");
  ASSERT_EQ(run.expert_loads.size(), 2u);
  EXPECT_EQ(run.expert_loads[0].shares, (std::vector<double>{3, 1, 0, 0}));
  EXPECT_EQ(run.expert_loads[1].layer, "h.10");
  const std::string page = report_html({run});
  EXPECT_EQ(count(page, "<svg class=\"columns\""), 2);
  EXPECT_EQ(count(page, "<title>expert "), 8);
  EXPECT_EQ(count(page, "<span class=\"number\">expert 0: 3.00</span>"), 1);
  EXPECT_EQ(report_html({one_run()}).find("class=\"loads\""),
            std::string::npos);
}

TEST(ReportLoads, MistakesAreSentences) {
  for (const char* loads :
       {"{\"h.0\": []}", "{\"h.0\": [1, -1]}", "{\"h.0\": \"many\"}"}) {
    const std::string text =
        std::string(R"({"chapter": "13_moe", "options": {"backend": "sim",
                        "world_size": 2}, "claims": {}, "expert_loads": )") +
        loads + "}";
    expect_error([&] { read_run(text, "run.json"); },
                 {"run.json: expert_loads.h.0"});
  }
}

TEST(ReportSvg, ACurveRunsFromPointToPoint) {
  const std::string text = pictures::svg::curve(
      {{0.25, 1, 0}, {0.75, 0.5, 0.1}}, 0.8, 0.9, "<title>");
  expect_text(text, {"d=\"M250.0 0.0L750.0 50.0\"", "M750.0 60.0V40.0",
                     "aria-label=\"&lt;title&gt;\""});
}

}  // namespace
}  // namespace shardbook::table
