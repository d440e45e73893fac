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
#include "chapters/pictures/units.h"
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
// numbers that went wrong. pictures_test.py says the same of stored pictures.
void expect_stands_alone(const std::string& svg) {
  EXPECT_EQ(svg.rfind("<svg xmlns=", 0), 0u);
  for (const char* part : {"class=", "<style", "<script", "var(", "\"nan",
                           "inf", " nan", "fill=\"\""}) {
    EXPECT_EQ(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(count_of(svg, "<svg"), 1u);
  expect_text(svg, {"<title>", "role=\"img\" aria-label=\""});
}

// The numbers of an attribute in all elements that begin like this.
std::vector<double> numbers_of(const std::string& svg, const std::string& begin,
                               const std::string& attribute) {
  std::vector<double> numbers;
  const std::regex pattern("<" + begin + "[^>]*? " + attribute +
                           "=\"([-0-9.]+)");
  for (std::sregex_iterator it(svg.begin(), svg.end(), pattern), end; it != end;
       ++it) {
    numbers.push_back(std::stod((*it)[1]));
  }
  return numbers;
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
      const std::string color = pictures::color_of((*s)[1]);
      if (color == (*s)[1].str()) continue;
      EXPECT_EQ(color, colors.at((*it)[2])) << (*s)[1];
      ++num_compared;
    }
  }
  EXPECT_GE(num_compared, 20);
}

// The relative luminance of WCAG 2: what is left of a colour in grey.
double light(const std::string& css_class) {
  const std::string color = pictures::color_of(css_class);
  double sum = 0;
  for (const auto& [at, weight] :
       {std::pair(1, 0.2126), std::pair(3, 0.7152), std::pair(5, 0.0722)}) {
    const double part = std::stoi(color.substr(at, 2), nullptr, 16) / 255.0;
    sum += weight * (part <= 0.04045 ? part / 12.92
                                     : std::pow((part + 0.055) / 1.055, 2.4));
  }
  return sum;
}

TEST(Figure, NeighboursDifferInGrey) {
  for (const auto& [a, b] :
       {std::pair("forward", "backward"), std::pair("forward", "weights"),
        std::pair("backward", "weights"), std::pair("backward", "optimizer"),
        std::pair("weights", "optimizer"),
        std::pair("kind-parameter", "kind-gradient"),
        std::pair("kind-gradient", "kind-optimizer_state"),
        std::pair("kind-optimizer_state", "kind-activation")}) {
    const auto [dark, bright] = std::minmax({light(a), light(b)});
    EXPECT_GT((bright + 0.05) / (dark + 0.05), 1.4) << a << " " << b;
  }
}

TEST(Figure, LongTitlesHaveLines) {
  const std::string svg =
      pictures::Figure("One statement that a narrow picture breaks\nA remark",
                       150)
          .svg("details & more");
  expect_stands_alone(svg);
  expect_text(svg, {"<title>One statement that a narrow picture breaks</title>",
                    "breaks. details &amp; more\"", ">A remark<"});
  EXPECT_EQ(count_of(svg, "font-weight"), 3u);
}

TEST(Figure, LabelsDoNotOverlap) {
  pictures::Figure figure("Three curves end in one point");
  figure.add_row(100);
  figure.labels(
      0, {{50, "a", "#000000"}, {50, "b", "#000000"}, {51, "c", "#000000"}});
  std::vector<double> heights = numbers_of(figure.svg(""), "text", "y");
  heights.erase(heights.begin());  // the title's
  ASSERT_EQ(heights.size(), 3u);
  EXPECT_GE(heights[1] - heights[0], 14);
  EXPECT_GE(heights[2] - heights[1], 14);
}

TEST(Units, NumbersHaveThreeDigits) {
  using pictures::text;
  EXPECT_EQ(text(0, {"ms", 1e-3}), "0");
  EXPECT_EQ(text(0.01256, {"ms", 1e-3}), "12.6 ms");
  EXPECT_EQ(text(0.99996, {"ms", 1e-3}), "1000 ms");
  EXPECT_EQ(text(-0.5, {"%", 0.01}), "-50.0 %");
  EXPECT_EQ(text(1.5, {}), "1.50");
  EXPECT_EQ(pictures::round_text(2048, {"KiB", 1024}), "2 KiB");
  EXPECT_EQ(pictures::seconds_unit(0.02).name, "ms");
  EXPECT_EQ(pictures::seconds_unit(0).name, "ns");
  EXPECT_EQ(pictures::bytes_unit(3e9).name, "GiB");
}

TEST(Pictures, TimelineHasALanePerQueueAndNumbersInBoxes) {
  const Picture picture = timeline("a", {timeline_of(0), timeline_of(1)});
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
  EXPECT_EQ(count_of(timeline("a", {rank}).svg, ">3<"), 2u);
}

TEST(Pictures, TimelineOfNoRunSaysSo) {
  EXPECT_EQ(timeline("a", {}).text, "no virtual time was kept");
  EXPECT_EQ(memory("a", {}).text, "no virtual time was kept");
}

// The second run takes half as long: its lanes are half as long, too.
TEST(Pictures, RunsThatAreComparedShareOneAxis) {
  sim::RankTimeline half = timeline_of(0);
  half.steps = {0, 0.5};
  half.events = {event("compute", "forward", 0, 0.5)};
  half.memory = {sample(0, 1024, 0)};
  const std::vector<NamedTimelines> runs = {{"whole", {timeline_of(0)}},
                                            {"half", {half}}};
  const Picture both = timelines("a", runs);
  expect_stands_alone(both.svg);
  expect_text(both.svg, {">whole: 1.00 s<", ">half: 500 ms<",
                         "half takes 500 ms. Compute is busy for 100 %"});
  const std::string lane =
      "rect(?=[^>]*fill=\"" + pictures::color_of("empty") + "\")";
  std::vector<double> widths = numbers_of(both.svg, lane, "width");
  widths.erase(widths.begin());  // of the legend
  ASSERT_EQ(widths.size(), 3u);  // compute, comm world, compute
  EXPECT_DOUBLE_EQ(widths[2], widths[0] / 2);
  EXPECT_EQ(count_of(both.svg, ">virtual time<"), 1u);
  expect_text(both.text, {"whole\nrank 0      0           200 ms      400 ms ",
                          "half\nrank 0    0            200 ms      400 ms "});

  const Picture bytes = memories("a", runs);
  expect_stands_alone(bytes.svg);
  EXPECT_EQ(bytes.text,
            "whole\nrank 0, at most 2.0 KiB: parameter 2.0 KiB\n"
            "half\nrank 0, at most 1.0 KiB: parameter 1.0 KiB\n");
  // Half of the bytes are half as high.
  expect_text(bytes.svg, {"M110 76H700V166H110z", "M110 247H405V292H110z"});
}

TEST(Pictures, MemoryLeavesOutWhatDependsOnTheMachine) {
  sim::RankTimeline first = timeline_of(0), second = timeline_of(0);
  second.rank = 1;
  second.memory[1] = sample(0.5, 2048, 512);  // scratch memory of one rank
  const Picture picture = memory("a", {first, second});
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
  const Picture picture =
      schedule("a", interleaved, pipeline::replay(interleaved));
  expect_stands_alone(picture.svg);
  EXPECT_EQ(count_of(picture.svg, ">3'<"), 4u);  // F and B on both ranks
  EXPECT_EQ(picture.svg.find("gradients of weights"), std::string::npos);
  const pipeline::Schedule split = pipeline::schedules::zb_h1(2, 4);
  expect_text(schedule("a", split, pipeline::replay(split)).svg,
              {"gradients of weights"});
}

// A forward and a backward in one slot hide each other if they are drawn in one
// place.
TEST(Pictures, ScheduleShowsBothOfAPair) {
  const pipeline::Schedule both = pipeline::schedules::dualpipe(4, 8);
  const pipeline::Costs costs{.overlapped_pair = 3};
  const std::string svg =
      schedule("a", both, pipeline::replay(both, costs)).svg;
  std::size_t num_actions = 0;
  for (const auto& list : both.actions) num_actions += list.size();
  const std::regex number(
      "<text (x=\"[0-9.]+\" y=\"[0-9.]+\")[^>]*fill=\"#ffffff\">[0-9]+'*<");
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
  const Picture picture = schedule("a", many, pipeline::replay(many));
  EXPECT_EQ(count_of(picture.svg, ">15'<"), 8u);  // F and B on four ranks
  EXPECT_EQ(count_of(picture.svg, ">15<"), 8u);
}

TEST(Pictures, SchedulesThatAreComparedShareOneAxis) {
  const pipeline::Schedule short_one = pipeline::schedules::zb_h1(2, 2);
  const pipeline::Schedule long_one = pipeline::schedules::zb_h1(2, 8);
  const pipeline::Replay first = pipeline::replay(short_one);
  const pipeline::Replay second = pipeline::replay(long_one);
  const std::string svg =
      schedules("a", {{"short", short_one, first}, {"long", long_one, second}})
          .svg;
  expect_stands_alone(svg);
  expect_text(svg, {">short<", ">long<"});
  const std::vector<double> widths = numbers_of(
      svg, "rect(?=[^>]*fill=\"" + pictures::color_of("empty") + "\")",
      "width");
  ASSERT_EQ(widths.size(), 5u);  // two ranks each, and the legend
  EXPECT_NEAR(widths[0] / widths[2], first.makespan / second.makespan, 1e-3);
}

TEST(Pictures, CurvesAndBarsSurviveEqualAndMissingValues) {
  const pictures::Unit ms{"ms", 1e-3};
  expect_stands_alone(
      curves("a", {{"flat", {1, 1, 1}}, {"none", {}}}, "loss").svg);
  expect_stands_alone(curves("a", {}, "loss").svg);
  expect_stands_alone(bars("a", {}, ms).svg);
  expect_stands_alone(bars("a", {{"zero"}}, ms).svg);
  expect_stands_alone(
      curve("a", {{"1", 2, 0.5}}, "rows", {"a", 1}, {"b", 0}, ms).svg);
  expect_stands_alone(curve("a", {}, "rows", {"a", 0}, {"b", 0}, ms).svg);
  expect_stands_alone(pictures::columns("a", {}, "expert", 1).svg);
  const std::string titled = bars("a < b", {{"x", 0.25}}, ms).svg;
  EXPECT_EQ(count_of(titled, "a &lt; b"),
            3u);  // for eyes, for readers, a title
  expect_text(titled, {"aria-label=\"a &lt; b. x 250 ms\"", ">100 ms<"});
  EXPECT_EQ(curves("a", {{"loss", {3, 2}}}, "loss").text,
            "      first   last\nloss  3.0000  2.0000\n");
}

// Zero is where the bars begin.
TEST(Pictures, BarsAreAsLongAsTheirValues) {
  const std::string svg = bars("a", {{"x", 1}, {"y", 4}}, {"s", 1}).svg;
  const std::string bar =
      "rect(?=[^>]*fill=\"" + pictures::color_of("time") + "\")";
  const std::vector<double> widths = numbers_of(svg, bar, "width");
  ASSERT_EQ(widths.size(), 2u);
  EXPECT_NEAR(widths[1], 4 * widths[0], 0.3);  // of a tenth each
  EXPECT_EQ(numbers_of(svg, bar, "x")[0],
            numbers_of(svg, "text(?=[^>]*>0<)", "x")[0]);
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

// The image is the SVG, and its text for readers is that of the SVG.
TEST(Display, PicturesAreImagesOfHtml) {
  const nl::json bundle = mime_bundle_repr(bars("a < b", {{"x", 1}}, {"s", 1}));
  const auto svg = bundle.at("image/svg+xml").get<std::string>();
  const auto html = bundle.at("text/html").get<std::string>();
  expect_text(html, {"<img alt=\"a &lt; b. x 1.00 s\" width=\"780\" "
                     "src=\"data:image/svg+xml;base64,PHN2ZyB4bWxucz"});
  const std::size_t begin = html.find("base64,") + 7;
  EXPECT_EQ(html.find('"', begin) - begin, (svg.size() + 2) / 3 * 4);
  EXPECT_EQ(mime_bundle_repr(Picture{"text alone"}).size(), 1u);
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
