#include <gtest/gtest.h>

#include "chapters/pictures/svg.h"
#include "chapters/table/html.h"
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
  expect_text(page, {"measured. Interrupted &lt;early&gt;."});
}

TEST(ReportHtml, DataCannotEndTheScript) {
  ProgramRun run = one_run();
  run.virtual_run.emplace();
  run.virtual_run->timeline.emplace();
  run.virtual_run->timeline_json = R"({"ops": [["</script>", "", ""]]})";
  const std::string page = report_html({run});
  expect_text(page, {R"([["\u003c/script>")"});
  EXPECT_EQ(page.find("\"</script>\""), std::string::npos);
}

TEST(ReportHtml, WithoutVirtualTimeThereIsNoTimeline) {
  const std::string page = report_html({one_run()});
  EXPECT_EQ(page.find("<figure class=\"timeline\""), std::string::npos);
  expect_text(page, {"id=\"data\">[null]</script>"});
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
  expect_text(report_html({}), {"0 runs, no claim was measured."});
}

TEST(ReportHtml, SharesOfALaneAddUpToTheStep) {
  ProgramRun run = one_run();
  run.virtual_run.emplace();
  sim::StepView& view = run.virtual_run->timeline.emplace();
  view.world_size = 1;
  view.step_s = 3;
  sim::RankGroup group;
  group.ranks = {0};
  group.timeline.events = {event("forward", 0, 1), event("bubble", 1, 2),
                           event("exposed", 2, 2.25)};
  view.groups = {group};
  run.virtual_run->timeline_json = "{}";
  const std::string page = report_html({run});
  EXPECT_NE(page.find(">busy 33.3 % + bubble 33.3 % + exposed communication "
                      "8.3 % + rest 25.1 %</p>"),
            std::string::npos)
      << page.substr(page.find("class=\"shares\""), 200);
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
  EXPECT_EQ(count(page, "<section class=\"group\">"), 2);
  EXPECT_EQ(count(page, "<figure class=\"scatter\">"), 2);
  // The longest step of each group fills its bar.
  EXPECT_EQ(count(page, "<rect class=\"time\" width=\"1000.0\""), 3);
}

TEST(ReportBuys, WhatDoesNotFitIsMarked) {
  const std::string page = report_html({simulated("DDP", 4, 0.5, 40e9)});
  expect_text(page, {"40 GB <span class=\"over\">does not fit</span>"});
  EXPECT_EQ(report_html({simulated("DDP", 4, 0.5, 32e9)})
                .find("<span class=\"over\">"),
            std::string::npos);
}

TEST(ReportHtml, ARunShowsItsCommandAndItsPage) {
  ProgramRun run = one_run();
  run.command = "./shardbook run ddp -- --trace 'a<b'";
  const std::string page = report_html({run});
  expect_text(page, {"<code>./shardbook run ddp -- --trace 'a&lt;b'</code>",
                     "href=\"../chapters/02_ddp/README.md\""});
  run.chapter = "local_sgd";
  EXPECT_EQ(report_html({run}).find("README.md"), std::string::npos);
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
