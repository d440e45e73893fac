#include <gtest/gtest.h>

#include "chapters/table/html.h"
#include "chapters/table/svg.h"

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

}  // namespace
}  // namespace shardbook::table
