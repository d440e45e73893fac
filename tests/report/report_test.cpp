// report.html in a browser: no script fails, nothing is missing, nothing has
// no size, nothing is too pale, in light and in dark, on a screen and a phone.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "chapters/table/html.h"
#include "tests/cli/programs.h"
#include "tests/report/browser.h"
#include "tests/support/temp_folder.h"

namespace shardbook::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Added to a copy of the page: collects errors, uses the page as a reader
// would, measures it, and writes what it found into the page.
constexpr const char* kWatch = R"html(<script>
window.errors = [];
addEventListener("error", (event) => errors.push(event.message));
</script>)html";

constexpr const char* kAudit = R"html(<script>
addEventListener("load", async () => {
  const all = (query) => [...document.querySelectorAll(query)];
  const tip = document.getElementById("tip");
  const said = [];
  // Runs are closed until the reader opens them; a run is drawn when opened.
  const undrawn = all(".run .view[data-drawn]").length;
  for (const details of all("details.run")) details.open = true;
  const isDone = (view) => "drawn" in view.dataset ||
                           view.querySelector(":scope > .note");
  for (let i = 0; i < 400 && !all(".view").every(isDone); ++i) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  for (const svg of all("svg.lane, svg.memory")) {
    const box = svg.getBoundingClientRect();
    for (const at of [0.1, 0.5, 0.9]) {
      svg.dispatchEvent(new PointerEvent("pointermove", {
        clientX: box.left + at * box.width, clientY: box.top + 2 }));
      if (tip.textContent) said.push(tip.textContent);
    }
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
    if (tip.textContent) said.push(tip.textContent);
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    if (tip.textContent) errors.push("Escape leaves the words");
  }

  // What the lanes of computing show, in shares of their width, beside what is
  // written about them.
  const widthOf = (svg, names) => [...svg.querySelectorAll("path")]
      .filter((path) => names.includes(path.getAttribute("class")))
      .flatMap((path) => [...path.getAttribute("d").matchAll(/h([\d.]+)v/g)])
      .reduce((sum, [, width]) => sum + Number(width), 0) /
          svg.viewBox.baseVal.width;
  const work = ["forward", "backward", "weights", "optimizer", "copy", "other"];
  const shares = all(".run svg.lane.compute").map((svg) => ({
    drawn: { busy: widthOf(svg, work), bubble: widthOf(svg, ["bubble"]),
             exposed: widthOf(svg, ["exposed"]) },
    said: svg.closest(".track").querySelector(".shares").textContent,
  }));

  // Zoomed in, a lane shows less in more detail; All shows the step again.
  const view = document.querySelector(".run .view[data-drawn]");
  const lane = view?.querySelector("svg.lane");
  const drawing = () => lane.innerHTML;
  const does = (action, undo) => {
    const before = drawing();
    action();
    const changed = drawing() !== before;
    undo();
    return { changed, back: drawing() === before };
  };
  const click = (name) => () => view.querySelector(`[data-do=${name}]`).click();
  // A drag from one share of the width to another.
  const drag = (from, to, more) => {
    const { left, top, width } = lane.getBoundingClientRect();
    const send = (type, at) => lane.dispatchEvent(new PointerEvent(type, {
      clientX: left + at * width, clientY: top + 2, buttons: 1, ...more }));
    send("pointerdown", from);
    send("pointermove", to);
    const marked = view.querySelectorAll(".marked").length;
    send("pointerup", to);
    return marked;
  };
  const uses = {};
  if (view) {
    uses.zoom = does(click("in"), click("all"));
    click("in")();
    uses.pan = does(click("left"), click("right"));
    uses.shiftDrag = does(() => drag(0.5, 0.75, { shiftKey: true }),
                          () => drag(0.75, 0.5, { shiftKey: true }));
    click("all")();
    const memory = view.querySelector("svg.memory");
    const whole = memory.innerHTML;
    uses.drag = does(() => {
      uses.marked = drag(0.25, 0.5);
      uses.linked = memory.innerHTML !== whole;
      uses.zoomed = view.classList.contains("zoomed");
      uses.axis = view.querySelector(".axis span").textContent;
    }, () => lane.dispatchEvent(new MouseEvent("dblclick")));
  }

  // A command is copied, or selected where the page may not copy.
  const copying = [];
  for (const clipboard of [{ writeText: async (text) => copying.push(text) },
                           undefined]) {
    Object.defineProperty(navigator, "clipboard",
                          { value: clipboard, configurable: true });
    const copy = document.querySelector(".source button");
    copy.click();
    await new Promise((resolve) => setTimeout(resolve, 0));
    copying.push(copy.textContent);
  }
  copying.push(String(getSelection()));
  getSelection().removeAllRanges();

  // Paper has the table of proofs.
  const proof = document.querySelector("#proof details");
  const wasOpen = proof.open;
  proof.open = false;
  dispatchEvent(new Event("beforeprint"));
  const onPaper = proof.open;
  dispatchEvent(new Event("afterprint"));
  const paper = { onPaper, after: proof.open };
  proof.open = wasOpen;

  // The axes of the scatter are linear or logarithmic.
  const scatter = document.querySelector("figure.scatter");
  const places = () => [...scatter.querySelectorAll(".point")].map(
      (point) => point.style.left + point.style.bottom).join();
  const axes = scatter.querySelector("button");
  const before = places(), name = axes.textContent;
  axes.click();
  const changed = axes.textContent !== name && places() !== before;
  axes.click();
  const scales = { changed, back: places() === before };
  // Names beside the points touch nothing.
  const overlaps = all(".point span:not(.no-room)").filter((name) => {
    const a = name.getBoundingClientRect();
    return all(".point, .point span:not(.no-room)").some((other) => {
      if (other.contains(name) || name.closest(".plane") !==
                                  other.closest(".plane")) return false;
      const b = other.getBoundingClientRect();
      return a.left < b.right - 1 && b.left < a.right - 1 &&
             a.top < b.bottom - 1 && b.top < a.bottom - 1;
    });
  }).length;

  // What axe-core calls serious: landmarks, the order of headings, names.
  const rules = [];
  for (const query of ["h1", "main", "header", "nav[aria-label]"]) {
    if (all(query).length !== 1) rules.push(`${query}: not one`);
  }
  all("h1, h2, h3, h4, h5").reduce((level, heading) => {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) rules.push(`h${next} after h${level}`);
    return next;
  }, 0);
  for (const control of all("button, a, input, summary, [tabindex]")) {
    if (!(control.textContent.trim() || control.ariaLabel ||
          control.closest("label"))) {
      rules.push(`no name: ${control.outerHTML.slice(0, 80)}`);
    }
  }
  for (const link of all("a[href^='#']")) {
    if (!document.getElementById(link.hash.slice(1))) rules.push(link.hash);
  }
  for (const cell of all("th:not([scope])")) rules.push(cell.outerHTML);
  const ids = all("[id]").map((each) => each.id);
  if (new Set(ids).size < ids.length) rules.push("an id appears twice");

  // Kinds of work are told apart by colour.
  const fills = {};
  for (const path of all("svg.lane path")) {
    fills[path.getAttribute("class")] = getComputedStyle(path).fill;
  }

  // Labels of one axis must not touch.
  const touching = all(".axis").filter((axis) => {
    const boxes = [...axis.children].map((mark) => mark.getBoundingClientRect())
        .sort((a, b) => a.left - b.left);
    return boxes.some((box, i) => i > 0 && box.left < boxes[i - 1].right - 1);
  }).length;
  const arrows = all("svg.arrows path").map(
      (path) => path.getAttribute("d").split("M").length - 1);

  // Contrast as WCAG 2 defines it, against the nearest background.
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((c) => c / 255).map(
        (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return rgb(color)[3] === 0 && element.parentElement
        ? behind(element.parentElement) : color;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) /
                             (Math.min(light(a), light(b)) + 0.05);
  const pale = [];
  for (const element of all("body *")) {
    const own = [...element.childNodes].some(
        (node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("script, svg, #tip")) continue;
    // The name of a point lies on the plane, not on the point.
    const ratio = contrast(getComputedStyle(element).color,
                           behind(element.closest(".plane") ?? element));
    if (ratio < 4.5) pale.push(`${element.className}: ${ratio}`);
  }
  for (const block of all("svg.lane path:not(.after), svg.memory path, svg.bar rect")) {
    const ratio = contrast(getComputedStyle(block).fill, behind(block));
    if (ratio < 3) pale.push(`${block.getAttribute("class")}: ${ratio}`);
  }

  // The button changes the page, and its own name.
  const page = () => getComputedStyle(document.body).backgroundColor;
  const button = document.getElementById("theme");
  const themes = [[button.textContent, page()]];
  button.click();
  themes.push([button.textContent, page()]);
  button.click();

  const audit = document.createElement("pre");
  audit.id = "audit";
  audit.textContent = JSON.stringify({
    errors, pale, said, themes,
    undrawn, shares, uses, scales, fills, touching, overlaps, arrows, rules,
    copying, paper, notes: all(".view > .note").map((note) => note.textContent),
    numbers: all("svg.lane text").map((text) => text.textContent),
    headings: all("h2, h4").map((h) => h.textContent),
    points: all(".point").length,
    drawings: all("svg").length,
    lanes: all(".run svg.lane").length,
    first: all("#first svg.lane").length,
    blocks: all("svg.lane path").length,
    curves: all("svg.memory").length,
    claims: all(".claim").length,
    empty: all("svg:not(.arrows)").filter((svg) => {
      const box = svg.getBoundingClientRect();
      return !(box.width >= 5 && box.height >= 5);
    }).length,
    unnamed: all("svg").filter((svg) => !svg.getAttribute("aria-label") &&
        svg.getAttribute("aria-hidden") !== "true").length,
    overhanging: all(".axis span").filter((mark) =>
        mark.getBoundingClientRect().right >
        mark.parentElement.getBoundingClientRect().right + 1).length,
    outside: document.documentElement.scrollWidth - innerWidth,
    page: getComputedStyle(document.body).backgroundColor,
    elements: all("b b, i").length,
    requests: performance.getEntriesByType("resource")
        .filter((entry) => !entry.name.startsWith("data:")).length,
  });
  document.body.append(audit);
});
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
  return table::report_html(runs);
}

std::string with_audit(std::string page) {
  page.insert(page.find("<meta charset"), kWatch);
  page.insert(page.rfind("</body>"), kAudit);
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

TEST(ReportFile, SameRunsGiveTheSameBytes) { EXPECT_EQ(html(), html()); }

TEST(ReportFile, NeedsNoNetwork) {
  const std::string page = html();
  for (const char* word : {"http:", "https:", "//cdn", "@import", "src="}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
}

}  // namespace
}  // namespace shardbook::report
