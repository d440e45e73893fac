// The numbers with which the README begins: rows of its overview, which other
// plans of the same kind do not beat.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/chapters/planner/planner_support.h"

namespace shardbook::planner {
namespace {

struct Row {
  double seconds = 0, gigabytes = 0;
};

std::string readme() {
  std::ifstream file(SHARDBOOK_ROOT "/README.md");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The rows of the overview, by label.
std::map<std::string, Row> rows() {
  static const std::regex kRow(
      R"( *\d+  (.+?) +([\d.]+) (m?)s +\(?[\d.]+\)? +([\d.]+) GB .*)");
  std::map<std::string, Row> found;
  std::istringstream lines(readme());
  for (std::string line; std::getline(lines, line);) {
    std::smatch parts;
    if (!std::regex_match(line, parts, kRow)) continue;
    found[parts[1]] = {std::stod(parts[2]) / (parts.length(3) > 0 ? 1e3 : 1),
                       std::stod(parts[4])};
  }
  return found;
}

/// "14.6 GB" and "2.25 s" of the headlines, in their order.
std::vector<std::string> headline_numbers() {
  const std::string text = readme();
  const std::size_t begin = text.find("\n- **");
  const std::string headlines =
      text.substr(begin, text.find("\n\n", begin) - begin);
  static const std::regex kNumber(R"([\d.]+( and [\d.]+)? (GB|s)\b)");
  std::vector<std::string> numbers;
  for (std::sregex_iterator at(headlines.begin(), headlines.end(), kNumber),
       end;
       at != end; ++at) {
    numbers.push_back(at->str());
  }
  return numbers;
}

/// The value with as many decimals as `shown`, which begins with a number.
std::string rounded_as(const std::string& shown, double value) {
  const std::string number =
      shown.substr(0, shown.find_first_not_of("0123456789."));
  const std::size_t point = number.find('.');
  std::ostringstream text;
  text.precision(point == std::string::npos
                     ? 0
                     : static_cast<int>(number.size() - point - 1));
  text << std::fixed << value;
  return text.str();
}

TEST(Headlines, AreRowsOfTheOverview) {
  std::map<std::string, Row> of = rows();
  const Row &ddp = of["DDP, 2 micro-batches"], &zero = of["ZeRO-3"],
            &gpipe = of["GPipe's order"], &again = of["GPipe, recomputes"],
            &one = of["1F1B"], &alone = of["ZeRO-3, recomputes"],
            &stages = of["PP 16, recomputes"], &all = of["TP 4 x PP 8 x DP 16"],
            &fsdp = of["FSDP, recomputes"], &cut = of["TP 4 x PP 4 x DP 32"];
  struct Shown {
    double value;
    const char* unit;
    double with = 0;  ///< the second of "16.2 and 19.6 s"
  };
  const std::vector<Shown> expected = {{fsdp.gigabytes, " GB"},
                                       {fsdp.seconds, " s"},
                                       {cut.gigabytes, " GB"},
                                       {cut.seconds, " s"},
                                       {32, " GB"},  // of a device
                                       {ddp.gigabytes, " GB"},
                                       {ddp.seconds, " s"},
                                       {zero.gigabytes, " GB"},
                                       {zero.seconds, " s"},
                                       {gpipe.gigabytes, " GB"},
                                       {one.gigabytes, " GB"},
                                       {gpipe.seconds, " s"},
                                       {again.gigabytes, " GB"},
                                       {again.seconds, " s"},
                                       {alone.seconds, " s", stages.seconds},
                                       {all.seconds, " s"}};
  const std::vector<std::string> shown = headline_numbers();
  ASSERT_EQ(shown.size(), expected.size());
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const Shown& each = expected[i];
    const std::string first = rounded_as(shown[i], each.value);
    EXPECT_EQ(shown[i],
              (each.with > 0 ? first + " and " + rounded_as(shown[i], each.with)
                             : first) +
                  each.unit);
  }
  EXPECT_EQ(rounded_as("1.4 s", gpipe.seconds),
            rounded_as("1.4 s", one.seconds));
}

/// The fastest of these plans that fits; none: its memory is 0.
Row best_of(const PlanRequest& request) {
  const PlanResult result = search(request);
  if (result.best.empty()) return {};
  const Prediction& best = result.best[0];
  return {best.step.seconds, best.memory.total() / 1e9};
}

void expect_near(const Row& row, const Row& planned) {
  EXPECT_NEAR(row.seconds, planned.seconds, 0.05 * planned.seconds);
  EXPECT_NEAR(row.gigabytes, planned.gigabytes, 0.25 * planned.gigabytes);
}

/// Only these degrees and this stage of ZeRO, without the host's memory.
Limits only(int tp, int pp, int zero_stage) {
  Limits limits;
  limits.tp = tp;
  limits.pp = pp;
  limits.zero_stage = zero_stage;
  limits.offloads = false;
  return limits;
}

TEST(Headlines, ShardsLeaveRoomForMoreSamplesAtOnce) {
  PlanRequest request =
      request_of("gpt2-xl", "dgx-v100", 8, 16, 1024, DType::kF32);
  request.limits = only(1, 1, 3);
  const Row sharded = best_of(request);
  expect_near(rows()["ZeRO-3"], sharded);
  // DDP has all gradients at all times. The hybrid chapter's replicas, which have
  // none in forward, hold two samples as well, in about twice the memory
  request.limits = only(1, 1, 0);
  const Row whole = best_of(request);
  EXPECT_GT(whole.seconds, sharded.seconds);
  EXPECT_GT(whole.gigabytes, 1.9 * sharded.gigabytes);
}

TEST(Headlines, OneAxisAloneComputesEveryBlockTwice) {
  PlanRequest request = request_of("gpt-175b", "selene", 512, 512, 2048);
  const auto planned = [&](const Limits& limits, const char* recompute) {
    request.limits = limits;
    request.limits.recompute = recompute;
    return best_of(request);
  };
  for (const char* less : {"never", "attention"}) {
    EXPECT_EQ(planned(only(1, 1, 3), less).gigabytes, 0);
    EXPECT_EQ(planned(only(1, 16, 1), less).gigabytes, 0);
  }
  std::map<std::string, Row> of = rows();
  expect_near(of["ZeRO-3, recomputes"], planned(only(1, 1, 3), "blocks"));
  expect_near(of["PP 16, recomputes"], planned(only(1, 16, 1), "blocks"));
  expect_near(of["TP 4 x PP 8 x DP 16"], planned(only(4, 8, 1), "never"));
}

}  // namespace
}  // namespace shardbook::planner
