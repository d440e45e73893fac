// The rows of ./shardbook run train, and show what the pages teach.

#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/programs.h"
#include "tests/support/default_rows.h"

namespace shardbook {
namespace {

using nlohmann::json;

/// The words of a row, quoted for the shell.
std::string quoted(const std::string& options) {
  std::istringstream in(options);
  std::string text;
  for (std::string word; in >> word;) text += " '" + word + "'";
  return text;
}

std::vector<DefaultRow> rows_under(const std::string& title) {
  std::vector<DefaultRow> rows;
  for (const DefaultRow& row : default_rows()) {
    if (row.title == title) rows.push_back(row);
  }
  return rows;
}

/// The "virtual" part of each row's report, by the row's label.
std::map<std::string, json> rows_of(const std::string& title) {
  std::map<std::string, json> rows;
  for (const DefaultRow& row : rows_under(title)) {
    // A sweep is for the report's picture
    const std::string options =
        row.options.substr(0, row.options.find("--sweep"));
    SCOPED_TRACE(row.label);
    const json report =
        json_of(run(row.chapter, "--format json" + quoted(options)));
    rows[row.label] =
        report.is_object() ? report.value("virtual", json()) : json();
  }
  return rows;
}

// An option that all rows share must be legal for each.
TEST(DefaultRows, EveryProofTrains) {
  const std::vector<DefaultRow> rows = rows_under("Proof");
  EXPECT_GT(rows.size(), 30u);
  for (const DefaultRow& row : rows) {
    const bool is_gloo =
        row.options.find("--backend gloo") != std::string::npos;
    if (is_gloo && !SHARDBOOK_HAVE_GLOO) continue;
    SCOPED_TRACE(row.label);
    expect_done(run(row.chapter, quoted(row.options + " --steps 1 --no-check "
                                                      "--cluster none")));
  }
}

// p = 4 ranks, m = 16 micro-batches, F = I = W. Beside the bubble there are the
// optimizer, launches, and stages that are not quite equal.
TEST(DefaultRows, PipelinesIdleNearTheirFormulas) {
  auto rows = rows_of("Order the work of a pipeline");
  const auto idle = [&](const char* label) {
    return rows[label].value("idle_share", -1.0);
  };
  EXPECT_NEAR(idle("GPipe's order"), 3.0 / (16 + 3), 0.03);
  EXPECT_NEAR(idle("1F1B"), 3.0 / (16 + 3), 0.03);
  EXPECT_NEAR(idle("Interleaved"), 3.0 / (2 * 16 + 3), 0.03);
  EXPECT_NEAR(idle("ZB-H1"), 3.0 / (3 * 16 + 3), 0.03);
  EXPECT_NEAR(idle("ZB-H2"), 3.0 / (3 * 16 + 3), 0.03);
  EXPECT_LT(idle("Interleaved"), idle("1F1B"));
  EXPECT_LT(idle("ZB-H1"), idle("Interleaved"));
  EXPECT_LT(idle("ZB-H2"), idle("ZB-H1"));
}

TEST(DefaultRows, TheBestSplitSizeLiesBetweenTheSmallestAndTheLargest) {
  auto rows = rows_of("Split the layers");
  const auto step_s = [&](const char* label) {
    return rows[label].value(json::json_pointer("/step_s/counted"), -1.0);
  };
  const double best = step_s("Splits of 20"), one = step_s("One device");
  EXPECT_GT(best, 0);
  EXPECT_LT(best, 0.8 * one);
  EXPECT_GT(step_s("Splits of 3"), one);
  EXPECT_GT(step_s("Splits of 60"), 1.1 * best);
}

}  // namespace
}  // namespace shardbook
