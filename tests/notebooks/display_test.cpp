#include "notebooks/display.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/pictures/figure.h"
#include "comm/launch.h"
#include "tests/support/errors.h"

namespace shardbook::notebook {
namespace {

std::string text_of(const nl::json& bundle) {
  return bundle.at("text/plain").get<std::string>();
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// What a page without style or scripts must not contain, nor a drawing with
// numbers that went wrong.
void expect_stands_alone(const std::string& svg) {
  EXPECT_EQ(svg.rfind("<svg xmlns=", 0), 0u);
  for (const char* part :
       {"class=", "<style", "<script", "var(", "nan", "inf"}) {
    EXPECT_EQ(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(count_of(svg, "<svg"), count_of(svg, "</svg>"));
}

sim::TimelineEvent event(const std::string& queue, const std::string& category,
                         double begin_s, double end_s,
                         const std::string& label = "") {
  sim::TimelineEvent made;
  made.name = "matmul";
  made.queue = queue;
  made.category = category;
  made.label = label;
  made.begin_s = begin_s;
  made.end_s = end_s;
  return made;
}

sim::MemorySample sample(double time_s, std::int64_t parameters,
                         std::int64_t workspace) {
  sim::MemorySample made;
  made.time_s = time_s;
  made.bytes[static_cast<std::size_t>(MemoryKind::kParameter)] = parameters;
  made.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)] = workspace;
  return made;
}

sim::RankTimeline timeline_of(int rank) {
  sim::RankTimeline timeline;
  timeline.rank = rank;
  timeline.steps = {0, 1};
  timeline.events = {
      event("compute", "forward", 0, 0.4, "micro-batch 3"),
      event("compute", "backward", 0.4, 0.9, "weights of micro-batch 3"),
      event("comm world", "comm", 0.5, 0.6 + 0.1 * rank)};
  timeline.memory = {sample(0, 2048, 0), sample(0.5, 2048, 100 * rank)};
  return timeline;
}

TEST(Figure, ColorsAreThoseOfTheReport) {
  std::ifstream file(std::string(SHARDBOOK_ROOT) +
                     "/chapters/table/report.css");
  const std::string css((std::istreambuf_iterator<char>(file)),
                        std::istreambuf_iterator<char>());
  // The first definition is that of light pages.
  std::map<std::string, std::string> colors;
  const std::regex definition("--([a-z-]+): (#[0-9a-f]{6});");
  for (std::sregex_iterator it(css.begin(), css.end(), definition), end;
       it != end; ++it) {
    colors.emplace((*it)[1], (*it)[2]);
  }
  const std::regex rule("\n(\\.[^{}\n]+) \\{ fill: var\\(--([a-z]+)\\); \\}");
  int num_compared = 0;
  for (std::sregex_iterator it(css.begin(), css.end(), rule), end; it != end;
       ++it) {
    const std::string selectors = (*it)[1];
    const std::regex name("\\.([a-z_-]+)");
    for (std::sregex_iterator s(selectors.begin(), selectors.end(), name);
         s != end; ++s) {
      // Some drawings are of the report alone.
      const std::string paint = pictures::paint_of((*s)[1]);
      if (paint.empty()) continue;
      EXPECT_EQ(paint, "fill=\"" + colors.at((*it)[2]) + "\"") << (*s)[1];
      ++num_compared;
    }
  }
  EXPECT_GE(num_compared, 20);
}

TEST(Figure, ClassesBecomeColors) {
  EXPECT_EQ(pictures::painted("<rect class=\"forward\" x=\"1\"/>"),
            "<rect fill=\"#2f6fb5\" x=\"1\"/>");
  EXPECT_EQ(pictures::painted("<svg class=\"bar\">"), "<svg >");
}

TEST(Pictures, TimelineHasALanePerQueueAndNumbersInBoxes) {
  const Picture picture = timeline({timeline_of(0), timeline_of(1)});
  expect_stands_alone(picture.svg);
  // The two ranks differ, so each has lanes of its own.
  EXPECT_EQ(count_of(picture.svg, ">compute<"), 2u);
  EXPECT_EQ(count_of(picture.svg, ">comm world<"), 2u);
  EXPECT_EQ(count_of(picture.svg, ">3<"), 4u);
  expect_text(picture.svg, {"deferred weight gradients"});
  expect_text(picture.text, {"F3FF"});
}

// Operations of one micro-batch are one box for its number, pauses included.
TEST(Pictures, TimelineNumbersAMicroBatchOnceAndEachStageApart) {
  sim::RankTimeline rank;
  rank.steps = {0, 1};
  for (int i = 0; i < 20; ++i) {
    const char* label =
        i < 10 ? "micro-batch 3, stage 0" : "micro-batch 3, stage 2";
    rank.events.push_back(
        event("compute", "forward", 0.05 * i, 0.05 * i + 0.01, label));
  }
  EXPECT_EQ(count_of(timeline({rank}).svg, ">3<"), 2u);
}

TEST(Pictures, TimelineOfNoRunSaysSo) {
  EXPECT_EQ(timeline({}).text, "no virtual time was kept");
  EXPECT_EQ(memory({}).text, "no virtual time was kept");
}

TEST(Pictures, MemoryLeavesOutWhatDependsOnTheMachine) {
  sim::RankTimeline first = timeline_of(0), second = timeline_of(0);
  second.rank = 1;
  second.memory[1] = sample(0.5, 2048, 512);  // scratch memory of one rank
  const Picture picture = memory({first, second});
  expect_stands_alone(picture.svg);
  EXPECT_EQ(picture.text, "ranks 0-1, at most 2.0 KiB: parameter 2.0 KiB\n");
  EXPECT_EQ(picture.svg.find("workspace"), std::string::npos);
}

TEST(Pictures, MeshNamesEveryRankOnce) {
  const Picture picture = mesh(Topology({"pp", "tp"}, {2, 2}));
  expect_stands_alone(picture.svg);
  EXPECT_EQ(picture.text,
            "pp=2 x tp=2: ranks by coordinate\n"
            "      tp=0  tp=1\n"
            "pp=0  0     1\n"
            "pp=1  2     3\n");
}

TEST(Pictures, ScheduleMarksChunksAndKindsOfWork) {
  const pipeline::Schedule interleaved =
      pipeline::schedules::interleaved(2, 4, 2);
  const Picture picture = schedule(interleaved, pipeline::replay(interleaved));
  expect_stands_alone(picture.svg);
  EXPECT_EQ(count_of(picture.svg, ">3'<"), 4u);  // F and B on both ranks
  EXPECT_EQ(picture.svg.find("gradients of weights"), std::string::npos);
  const pipeline::Schedule split = pipeline::schedules::zb_h1(2, 4);
  expect_text(schedule(split, pipeline::replay(split)).svg,
              {"gradients of weights"});
}

// A forward and a backward in one slot hide each other if they are drawn in one
// place.
TEST(Pictures, ScheduleShowsBothOfAPair) {
  const pipeline::Schedule both = pipeline::schedules::dualpipe(4, 8);
  const pipeline::Costs costs{.overlapped_pair = 3};
  const std::string svg = schedule(both, pipeline::replay(both, costs)).svg;
  std::size_t num_actions = 0;
  for (const auto& list : both.actions) num_actions += list.size();
  const std::regex number("<text (x=\"[0-9.]+\" y=\"[0-9.]+\")[^>]*>[0-9]+'*<");
  std::set<std::string> places;
  for (std::sregex_iterator it(svg.begin(), svg.end(), number), end; it != end;
       ++it) {
    places.insert((*it)[1]);
  }
  EXPECT_EQ(places.size(), num_actions);
  EXPECT_EQ(count_of(svg, ">7'<"), 4u * 2 + 3);  // F and B, or F, I and W
}

// A longer schedule is a longer picture.
TEST(Pictures, ScheduleHasRoomForEveryNumber) {
  const pipeline::Schedule many = pipeline::schedules::interleaved(4, 16, 2);
  const Picture picture = schedule(many, pipeline::replay(many));
  EXPECT_EQ(count_of(picture.svg, ">15'<"), 8u);  // F and B on four ranks
  EXPECT_EQ(count_of(picture.svg, ">15<"), 8u);
}

TEST(Pictures, CurvesAndBarsSurviveEqualAndMissingValues) {
  expect_stands_alone(curves({{"flat", {1, 1, 1}}, {"none", {}}}).svg);
  expect_stands_alone(curves({}).svg);
  expect_stands_alone(bars({}).svg);
  expect_stands_alone(bars({{"zero", 0, 0, "0"}}).svg);
  expect_stands_alone(
      curve({{"1", 2, 0.5, "2"}}, {"a", 1, 0, "1"}, {"b", 0, 0, "0"}).svg);
  for (const std::string& titled :
       {bars({{"a", 1, 0, "1"}}, "a < b").svg,
        curve({{"1", 2, 0, "2"}}, {"a", 1}, {"b", 1}, "a < b").svg}) {
    expect_stands_alone(titled);
    EXPECT_EQ(count_of(titled, "a &lt; b"), 2u);  // for eyes, for readers
  }
  EXPECT_EQ(curves({{"loss", {3, 2}}}).text,
            "      first   last\nloss  3.0000  2.0000\n");
}

TEST(Display, TensorShowsShapeDtypeDeviceAndValues) {
  const Tensor x = Tensor::from_values<float>({1, 2, 3, 4}, {2, 2});
  const nl::json bundle = mime_bundle_repr(x);
  EXPECT_EQ(text_of(bundle), "f32 [2, 2] on cpu:0\n1  2\n3  4\n");
  expect_text(bundle.at("text/html").get<std::string>(), {"<td"});
}

TEST(Display, LargeTensorShowsItsCorners) {
  const std::string text = text_of(mime_bundle_repr(Tensor::arange(100)));
  EXPECT_EQ(text, "f32 [100] on cpu:0\n0  1  2  ...  97  98  99\n");
}

TEST(Display, TensorsWithoutValues) {
  EXPECT_EQ(text_of(mime_bundle_repr(Tensor())), "an undefined tensor");
  const Tensor shape = Tensor::zeros({2}, {DType::kF32, Device::meta(1)});
  EXPECT_EQ(text_of(mime_bundle_repr(shape)),
            "f32 [2] on meta:1: a shape without values");
  EXPECT_EQ(text_of(mime_bundle_repr(Tensor::zeros({0}))),
            "f32 [0] on cpu:0\n");
}

TEST(Display, LedgerAddsUpWhatTheCallsSend) {
  std::vector<CommRecord> records;
  run_ranks(4, [&](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({8});
    world.all_reduce(x).wait();
    world.all_reduce(x).wait();
    world.broadcast(x, 0).wait();
    if (world.rank() == 0) records = world.records();
  });
  // 2 * 3/4 * 32 bytes each; 3/4 * 32.
  EXPECT_EQ(ledger(records).text,
            "call        ranks       for  elements  times  bytes sent\n"
            "all_reduce  world of 4       8 f32     2      96\n"
            "broadcast   world of 4       8 f32     1      24\n"
            "all calls                              3      120\n");
}

TEST(Display, ClaimsSayWhatDiffers) {
  Report report;
  RankReport rank;
  rank.bytes = {100, 100};
  report.ranks = {rank, rank};
  rank.bytes = {100, 99};
  report.ranks.push_back(rank);
  const std::string text = text_of(mime_bundle_repr(report));
  expect_text(text, {"ranks 0-1  bytes sent  100        100      equal",
                     "rank 2     bytes sent  100        99       DIFFERENT"});
}

TEST(Display, VerdictIsALine) {
  EXPECT_EQ(verdict("exercise 1", true), "exercise 1: right\n");
  EXPECT_EQ(verdict("exercise 1", false), "exercise 1: not yet\n");
  // Formulas round in different orders.
  EXPECT_EQ(verdict("e", 0.1 + 0.2, 0.3), "e: right\n");
  EXPECT_EQ(verdict("e", -3 * 1.1, -3.3), "e: right\n");
  EXPECT_EQ(verdict("e", 1e9 + 10, 1e9), "e: not yet\n");
  EXPECT_EQ(verdict("e", std::nan(""), 1), "e: not yet\n");
}

}  // namespace
}  // namespace shardbook::notebook
