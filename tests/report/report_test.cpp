// report.html in a browser: no script fails, nothing is missing, nothing has
// no size, nothing is too pale, in light and in dark, on a screen and a phone.

#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>

#include "chapters/table/table.h"
#include "tests/cli/programs.h"
#include "tests/report/browser.h"
#include "tests/support/temp_folder.h"

namespace shardbook::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Added to a copy of the page: collects errors. audit.js adds what it finds.
constexpr const char* kWatch = R"html(<script>
window.errors = [];
addEventListener("error", (event) => errors.push(event.message));
</script>)html";

/// The report that a program writes.
json report_of(const std::string& chapter, const std::string& options) {
  const std::string file = folder() / "run.json";
  const Outcome outcome =
      run(chapter, "--data walk --no-check --report " + file + " " + options);
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  return json::parse(std::ifstream(file), nullptr, /*allow_exceptions=*/false);
}

/// Runs whose ranks do the same, and some whose do not; without virtual time;
/// with failed claims and a hostile name.
const std::vector<json>& reports() {
  static const std::vector<json> kReports = [] {
    const std::string small = "--steps 3 --batch 8 --seq 16 --world-size 4 ";
    const std::string slow = folder() / "slow.json";
    std::ofstream(slow) << R"({"extends": "dgx-a100", "name": "<i>slow</i>",
        "faults": [{"rank": 3, "compute_slowdown": 1.5}]})";
    const std::string pipeline =
        "--world-size 4 --backend sim --model gpt2 --batch 32 --seq 512 "
        "--micro-batches 8";
    const json one = report_of("00_single_device",
                               "--steps 2 --batch 8 --seq 16 --cluster none");
    json failed = one;
    failed["chapter"] = "99_<b>&\"hostile\"</script>";
    failed["claims"]["bytes"] = "failed";
    failed["bytes"] = {{{"predicted", 64}, {"counted", 96}}};
    return std::vector<json>{
        one,
        report_of("02_ddp", small + "--cluster " + slow),
        report_of("03_zero_fsdp", small + "--strategy fsdp"),
        report_of("05_gpipe", pipeline),
        report_of("05_gpipe", pipeline + " --recompute never"),
        failed};
  }();
  return kReports;
}

constexpr const char* kCommand = "./shardbook run single_device -- --steps 2";

std::string html() {
  std::vector<table::ProgramRun> runs;
  for (const json& report : reports()) {
    runs.push_back(table::read_run(report.dump(), "fixture"));
  }
  runs[0].command = kCommand;
  runs[3].label = "recomputes";
  runs[4].label = "keeps";
  return table::report_html(runs, "", {"..", "explorer"});
}

std::string with_audit(std::string page) {
  page.insert(page.find("<meta charset"), kWatch);
  std::string audit;
  for (const char* name : {"accessible.js", "audit.js"}) {
    std::ifstream file(SHARDBOOK_ROOT "/tests/report/" + std::string(name));
    audit.append(std::istreambuf_iterator<char>(file), {});
  }
  page.insert(page.rfind("</body>"), "<script>\n" + audit + "</script>\n");
  return page;
}

// The text of <pre id="audit">, as JSON.
json audit_of(const Page& page) {
  const std::string mark = "<pre id=\"audit\">";
  const std::size_t begin = page.dom.find(mark);
  if (begin == std::string::npos) return nullptr;
  const std::size_t end = page.dom.find("</pre>", begin);
  std::string text =
      page.dom.substr(begin + mark.size(), end - begin - mark.size());
  for (const auto& [escaped, plain] :
       {std::pair{"&lt;", "<"}, {"&gt;", ">"}, {"&amp;", "&"}}) {
    for (std::size_t at = 0; (at = text.find(escaped, at)) != std::string::npos;
         ++at) {
      text.replace(at, std::string(escaped).size(), plain);
    }
  }
  return json::parse(text);
}

/// The ranks that do the same, of all timelines.
std::vector<json> groups() {
  std::vector<json> all;
  for (const json& report : reports()) {
    const json& time = report["virtual"];
    if (!time.is_object()) continue;
    for (const json& group : time["timeline"]["groups"]) all.push_back(group);
  }
  return all;
}

class Report : public testing::Test {
 protected:
  void SetUp() override {
    browser_ = find_browser();
    if (browser_.empty()) {
      GTEST_SKIP() << "no browser here (package chromium)";
    }
    file_ = folder_ / "report.html";
  }

  // What the script finds in a page.
  json audit(const std::string& page, Visit visit) {
    std::ofstream(file_, std::ios::binary) << with_audit(page);
    visit.file = file_;
    const Page shown = shardbook::report::visit(browser_, visit);
    EXPECT_EQ(shown.status, 0) << shown.log;
    // What scripts write to the console, errors included.
    EXPECT_EQ(shown.log.find("CONSOLE"), std::string::npos) << shown.log;
    const json found = audit_of(shown);
    EXPECT_FALSE(found.is_null()) << shown.dom.substr(0, 2000) << shown.log;
    return found;
  }

  // The same for the page of all runs; most tests look at one visit of it.
  const json& audit(const Visit& visit) {
    static std::map<std::pair<bool, int>, json> visits;
    json& found = visits[{visit.dark, visit.width}];
    if (found.is_null()) found = audit(html(), visit);
    return found;
  }

  std::string browser_;
  TempFolder folder_;
  std::string file_;
};

void expect_sound(const json& audit) {
  EXPECT_EQ(audit["errors"], json::array());
  EXPECT_EQ(audit["pale"], json::array());
  EXPECT_EQ(audit["empty"], 0);
  EXPECT_EQ(audit["unnamed"], 0);
  EXPECT_EQ(audit["overhanging"], 0) << "marks of an axis";
  EXPECT_EQ(audit["touching"], 0) << "labels of an axis";
  EXPECT_EQ(audit["overlaps"], 0) << "names of points";
  EXPECT_EQ(audit["rules"], json::array());
  EXPECT_EQ(audit["notes"], json::array());
  EXPECT_EQ(audit["requests"], 0);
  EXPECT_LE(audit["outside"], 0) << "the page is wider than the window";
}

TEST_F(Report, ShowsEveryRun) {
  const json found = audit({});
  expect_sound(found);
  EXPECT_EQ(
      found["headings"],
      json({"What it buys", "Proof: 3 of 4 runs hold", "The runs",
            "recomputes, sim \u00d74", "keeps, sim \u00d74",
            "00_single_device, threads \u00d71", "02_ddp, threads \u00d74",
            "03_zero_fsdp fsdp, threads \u00d74",
            "99_<b>&\"hostile\"</script>, threads \u00d71",
            "What the words mean"}));
  EXPECT_EQ(found["claims"], 6 * 4);
  std::size_t lanes = 0;
  for (const json& group : groups()) lanes += group["queues"].size();
  EXPECT_EQ(found["lanes"], lanes);
  EXPECT_EQ(found["curves"], groups().size());
  EXPECT_EQ(found["points"], 2);
  // Two runs of four stages, each with a lane of messages
  EXPECT_EQ(found["first"], 2 * 4 * 2);
  EXPECT_EQ(found["undrawn"], 0) << "a closed run was drawn";
  EXPECT_GE(found["blocks"], found["lanes"]);
  EXPECT_EQ(found["elements"], 0) << "names of runs became elements";
}

TEST_F(Report, SaysWhatLiesUnderThePointer) {
  const json found = audit({});
  const std::string said = found["said"].dump();
  for (const char* words : {"all_reduce, bucket ", "(backward)", " GFLOP, ",
                            " TFLOP/s", "send, activations micro-batch ",
                            "to rank 1", "from rank 0", "activation 417 MiB"}) {
    EXPECT_NE(said.find(words), std::string::npos) << words << "\n" << said;
  }
  EXPECT_EQ(said.find("NaN"), std::string::npos) << said;
  EXPECT_EQ(said.find("undefined"), std::string::npos) << said;
}

TEST_F(Report, LanesShowWhatIsWrittenAboutThem) {
  const json found = audit({});
  ASSERT_EQ(found["shares"].size(), groups().size());
  for (const json& lane : found["shares"]) {
    const std::string said = lane["said"];
    double busy = 0, bubble = 0, exposed = 0, rest = 0;
    ASSERT_EQ(std::sscanf(said.c_str(),
                          "busy %lf %% + bubble %lf %% + exposed communication "
                          "%lf %% + rest %lf %%",
                          &busy, &bubble, &exposed, &rest),
              4)
        << said;
    EXPECT_NEAR(busy + bubble + exposed + rest, 100, 1e-6) << said;
    // Blocks have seams, and are at least half a pixel wide: where the host is
    // slow, many operations are shorter.
    EXPECT_NEAR(100 * lane["drawn"]["busy"].get<double>(), busy,
                rest > 50 ? 10 : 2)
        << said;
    EXPECT_NEAR(100 * lane["drawn"]["bubble"].get<double>(), bubble, 2) << said;
    EXPECT_NEAR(100 * lane["drawn"]["exposed"].get<double>(), exposed, 2)
        << said;
  }
}

TEST_F(Report, MicroBatchesHaveNumbersAndMessagesHaveArrows) {
  const json found = audit({});
  const std::string numbers = found["numbers"].dump();
  for (const char* number : {"\"0\"", "\"7\""}) {
    EXPECT_NE(numbers.find(number), std::string::npos) << numbers;
  }
  // Three stage borders, eight micro-batches, there and back; twice.
  ASSERT_EQ(found["arrows"].size(), 2u);
  EXPECT_EQ(found["arrows"][0], 3 * 8 * 2);
}

TEST_F(Report, CanBeZoomedAndPannedAndItsAxesChanged) {
  const json found = audit({});
  const json there_and_back = {{"changed", true}, {"back", true}};
  for (const char* use : {"zoom", "pan", "shiftDrag", "drag"}) {
    EXPECT_EQ(found["uses"][use], there_and_back) << use;
  }
  EXPECT_EQ(found["scales"], there_and_back);
}

TEST_F(Report, ADragZoomsTheTimelineAndTheMemoryOfARun) {
  const json uses = audit({})["uses"];
  EXPECT_GT(uses["marked"], 1) << "pictures that show the part of time";
  EXPECT_EQ(uses["zoomed"], true);
  EXPECT_EQ(uses["linked"], true);
  EXPECT_NE(uses["axis"], "0");
}

TEST_F(Report, ACommandIsCopiedOrElseSelected) {
  EXPECT_EQ(audit({})["copying"],
            json({kCommand, "Copied", "Selected: press Ctrl+C", kCommand}));
}

TEST_F(Report, PaperHasTheTableOfProofs) {
  EXPECT_EQ(audit({})["paper"], json({{"onPaper", true}, {"after", false}}));
}

TEST_F(Report, DataThatCannotBeReadLeavesASentence) {
  std::string page = html();
  const std::string mark = "id=\"data-1\">";
  page.replace(page.find(mark) + mark.size(), 8, "AAAAAAAA");
  const json found = audit(page, {});
  EXPECT_EQ(found["errors"], json::array());
  ASSERT_EQ(found["notes"].size(), 1u);
  EXPECT_EQ(found["notes"][0].get<std::string>().find(
                "The data of this timeline cannot be read: "),
            0u)
      << found["notes"];
  EXPECT_GT(found["arrows"].size(), 0u) << "other runs are drawn";
}

TEST_F(Report, ABrowserThatCannotInflateLeavesASentence) {
  std::string page = html();
  page.insert(page.find("<meta charset"),
              "<script>delete window.DecompressionStream;</script>");
  const json found = audit(page, {});
  EXPECT_EQ(found["errors"], json::array());
  EXPECT_EQ(found["notes"].size(), 5u);
  EXPECT_EQ(found["notes"][0],
            "This browser cannot draw timelines: it has no "
            "DecompressionStream, which browsers have had since 2023.");
}

TEST_F(Report, WorkHasColoursOfItsOwn) {
  const json fills = audit({})["fills"];
  std::set<std::string> colours;
  for (const char* kind :
       {"forward", "backward", "optimizer", "comm", "exposed", "bubble"}) {
    ASSERT_TRUE(fills.contains(kind)) << kind << " of " << fills.dump();
    EXPECT_TRUE(colours.insert(fills[kind]).second) << kind << fills.dump();
  }
}

TEST_F(Report, IsDarkWhereTheSystemIs) {
  const json light = audit({}), dark = audit({.dark = true});
  expect_sound(dark);
  EXPECT_EQ(light["page"], "rgb(251, 251, 250)");
  EXPECT_EQ(dark["page"], "rgb(20, 22, 26)");
}

TEST_F(Report, TheButtonSwitchesBetweenLightAndDark) {
  const json light = json::array({"Dark", "rgb(251, 251, 250)"});
  const json dark = json::array({"Light", "rgb(20, 22, 26)"});
  EXPECT_EQ(audit({})["themes"], json::array({light, dark}));
  EXPECT_EQ(audit({.dark = true})["themes"], json::array({dark, light}));
}

TEST_F(Report, TheOtherLanguageIsAClickAway) {
  const json found = audit({})["languages"];
  EXPECT_EQ(found["begin"], "en");
  EXPECT_EQ(found["lang"], "zh-CN");
  EXPECT_EQ(found["kept"], "zh-CN");
  EXPECT_EQ(found["button"], "English");
  EXPECT_EQ(found["headings"],
            json({"能换来什么", "验证：4 次运行中有 3 次成立", "各次运行",
                  "词汇的含义"}));
  EXPECT_EQ(found["links"][0], "../chapters/05_gpipe/README.zh-CN.md");
  EXPECT_EQ(found["back"], true);
}

TEST_F(Report, OnlyNamesStayEnglish) {
  EXPECT_EQ(audit({})["languages"]["same"],
            json({"# GiB", "# MiB", "# rank", "MiB", "nvlink", "rank #",
                  "ranks #-#", "reduce", "threads \u00d7#"}));
  for (const std::string tip : audit({})["languages"]["tips"]) {
    EXPECT_NE(tip.find("从 "), std::string::npos) << tip;
  }
}

TEST_F(Report, TheAddressMayNameTheLanguage) {
  std::ofstream(file_, std::ios::binary) << with_audit(html());
  const json found =
      audit_of(visit(browser_, {.file = file_ + "#lang=zh-CN"}))["languages"];
  EXPECT_EQ(found["begin"], "zh-CN");
  EXPECT_EQ(found["lang"], "en");
}

TEST_F(Report, FitsWindowsFromAPhoneToAScreen) {
  for (const int width : {390, 800, 1400}) {
    SCOPED_TRACE(width);
    expect_sound(audit({.width = width, .height = 844}));
  }
}

TEST_F(Report, TheWatchSeesAScriptThatFails) {
  std::string page = with_audit(html());
  page.insert(page.rfind("<script>"), "<script>nothing.here();</script>");
  std::ofstream(file_, std::ios::binary) << page;
  const json found = audit_of(visit(browser_, {.file = file_}));
  EXPECT_EQ(found["errors"].size(), 1u) << found.dump();
}

const json& words() {
  static const json kWords = json::parse(
      std::ifstream(SHARDBOOK_ROOT "/chapters/table/report_words.json"));
  return kWords["zh-CN"];
}

TEST(ReportWords, ATranslationHasEachValueOnce) {
  for (const auto& [english, chinese] : words().items()) {
    std::string rest = chinese;
    int count = 0;
    for (std::size_t at = 0; (at = english.find("{}", at)) != std::string::npos;
         ++at) {
      const std::string hole = "{" + std::to_string(count++) + "}";
      const std::size_t place = rest.find(hole);
      ASSERT_NE(place, std::string::npos) << english << ": " << hole;
      rest.erase(place, hole.size());
    }
    EXPECT_EQ(rest.find('{'), std::string::npos) << english << ": " << rest;
    EXPECT_FALSE(rest.empty()) << english;
  }
}

// All that writes words into the page, without the seams of long texts.
std::string sources() {
  std::string text;
  for (const char* folder : {"chapters/table", "sim", "core"}) {
    for (const auto& entry :
         fs::directory_iterator(SHARDBOOK_ROOT "/" + std::string(folder))) {
      const std::string kind = entry.path().extension();
      if (kind != ".cpp" && kind != ".h" && kind != ".js" && kind != ".html") {
        continue;
      }
      std::ifstream file(entry.path());
      text.append(std::istreambuf_iterator<char>(file), {});
    }
  }
  std::ifstream rows(SHARDBOOK_ROOT "/chapters/rows.txt");
  text.append(std::istreambuf_iterator<char>(rows), {});
  return std::regex_replace(text, std::regex("\"( \\+)?\\s*\n\\s*\""), "");
}

TEST(ReportWords, NoneIsUnused) {
  const auto lower = [](std::string text) {
    for (char& letter : text) {
      letter = static_cast<char>(std::tolower(letter));
    }
    return text;
  };
  const std::string all = lower(sources());
  const std::regex phrase("[A-Za-z][^{}.,:;0-9]*");
  for (const auto& [english, chinese] : words().items()) {
    for (std::sregex_iterator at(english.begin(), english.end(), phrase), end;
         at != end; ++at) {
      std::string part = lower(at->str());
      part.erase(part.find_last_not_of(' ') + 1);
      EXPECT_NE(all.find(part), std::string::npos)
          << english << ": nothing writes \"" << part << "\"";
    }
  }
}

TEST(ReportFile, SameRunsGiveTheSameBytes) { EXPECT_EQ(html(), html()); }

TEST(ReportFile, NeedsNoNetwork) {
  const std::string page = html();
  for (const char* word : {"http:", "https:", "//cdn", "@import", "src="}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
}

}  // namespace
}  // namespace shardbook::report
