#include <gtest/gtest.h>

#include "chapters/table/html.h"
#include "chapters/table/svg.h"
#include "core/check.h"

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
  EXPECT_NE(page.find("&lt;script&gt;alert(&quot;&amp;&quot;)"),
            std::string::npos);
}

TEST(ReportHtml, DataCannotEndTheScript) {
  ProgramRun run = one_run();
  run.virtual_run.emplace();
  run.virtual_run->timeline.emplace();
  run.virtual_run->timeline_json = R"({"ops": [["</script>", "", ""]]})";
  const std::string page = report_html({run});
  EXPECT_NE(page.find(R"([["\u003c/script>")"), std::string::npos);
  EXPECT_EQ(page.find("\"</script>\""), std::string::npos);
}

TEST(ReportHtml, WithoutVirtualTimeThereIsNoTimeline) {
  const std::string page = report_html({one_run()});
  EXPECT_EQ(page.find("<figure class=\"timeline\""), std::string::npos);
  EXPECT_NE(page.find("id=\"data\">[null]</script>"), std::string::npos);
}

TEST(ReportHtml, RanksWithOneBillShareRows) {
  ProgramRun run = one_run();
  run.ranks = {bill(1234567, 1234567), bill(8, 9), bill(1234567, 1234567)};
  const std::string page = report_html({run});
  EXPECT_EQ(count(page, "scope=\"rowgroup\">"), 2);
  EXPECT_NE(page.find(">ranks 0, 2, each<"), std::string::npos);
  EXPECT_NE(page.find("<td>1,234,567 B</td>"), std::string::npos);
  EXPECT_EQ(count(page, "aria-label=\"different\""), 1);
}

TEST(ReportHtml, AnEmptyReportIsAPage) {
  EXPECT_NE(report_html({}).find("0 runs, no claim was measured."),
            std::string::npos);
}

// The subpaths of a lane's picture.
int blocks(const sim::RankTimeline& timeline) {
  return count(svg::lane(timeline, "compute", 1, "", ""), "M");
}

TEST(ReportSvg, ShortNeighboursAreOneBlock) {
  sim::RankTimeline timeline;
  for (int i = 0; i < 1000; ++i) {
    timeline.events.push_back(event("forward", i * 1e-3, (i + 1) * 1e-3));
  }
  EXPECT_EQ(blocks(timeline), 1);
}

TEST(ReportSvg, LongNeighboursStayApart) {
  sim::RankTimeline timeline;
  timeline.events = {event("comm", 0, 0.25), event("comm", 0.25, 0.5)};
  EXPECT_EQ(blocks(timeline), 2);
}

TEST(ReportSvg, WaitsAreNotDrawn) {
  sim::RankTimeline timeline;
  timeline.events = {event("wait", 0, 0.25), event("forward", 0.25, 0.5)};
  EXPECT_EQ(blocks(timeline), 1);
}

TEST(ReportSvg, ShortOperationsCanStillBeSeen) {
  sim::RankTimeline timeline;
  timeline.events = {event("comm", 0.5, 0.5000001)};
  EXPECT_NE(svg::lane(timeline, "compute", 1, "", "").find("M500.0 0h0.8"),
            std::string::npos);
}

TEST(ReportSvg, KindsAreStacked) {
  sim::RankTimeline timeline;
  sim::MemorySample sample;
  sample.bytes[0] = 30;
  sample.bytes[1] = 20;
  timeline.memory = {sample};
  const std::string picture = svg::memory(timeline, 1, 100, "", "");
  // The sum of both stands behind the first kind.
  const std::size_t both =
      picture.find("kind-gradient\" d=\"M0 100H0.0V50.0H1000V100z");
  const std::size_t first =
      picture.find("kind-parameter\" d=\"M0 100H0.0V70.0H1000V100z");
  ASSERT_NE(both, std::string::npos) << picture;
  ASSERT_NE(first, std::string::npos) << picture;
  EXPECT_LT(both, first);
}

TEST(ReportSvg, ThePeakIsDrawnHoweverShort) {
  sim::RankTimeline timeline;
  for (int i = 0; i < 10'000; ++i) {
    sim::MemorySample sample;
    sample.time_s = i * 1e-4;
    sample.bytes[0] = i == 5001 ? 100 : 10;
    timeline.memory.push_back(sample);
  }
  const std::string picture = svg::memory(timeline, 1, 100, "", "");
  EXPECT_NE(picture.find("V0.0H"), std::string::npos);
  EXPECT_LT(picture.size(), 1000u);
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
  EXPECT_NE(page.find("1.25 s \u00b1 250 ms"), std::string::npos);
  // The naive bar is the longest of its clock, and nothing deviates from it.
  EXPECT_NE(page.find("M1000.0 5H1000.0"), std::string::npos);
  EXPECT_NE(page.find("splits of 2: 700 ms; splits of 6: 400 ms"),
            std::string::npos);
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
    try {
      read_run(text, "run.json");
    } catch (const Error& problem) {
      return std::string(problem.what());
    }
    return std::string();
  };
  EXPECT_NE(error("\"repeats\": 5", "\"repeats\": \"5\"").find("repeats"),
            std::string::npos);
  EXPECT_NE(error("\"virtual_s\": 0.4", "\"virtual_s\": -1")
                .find("sweep.pipeline: virtual_s"),
            std::string::npos);
}

TEST(ReportSvg, ACurveRunsFromPointToPoint) {
  const std::string text =
      svg::curve({{0.25, 1, 0}, {0.75, 0.5, 0.1}}, 0.8, 0.9, "<title>");
  EXPECT_NE(text.find("d=\"M250.0 0.0L750.0 50.0\""), std::string::npos);
  EXPECT_NE(text.find("M750.0 60.0V40.0"), std::string::npos);
  EXPECT_NE(text.find("aria-label=\"&lt;title&gt;\""), std::string::npos);
}

}  // namespace
}  // namespace shardbook::table
