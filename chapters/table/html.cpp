// The whole page, its words, each with one definition, and tables whose columns are
// such words.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/table.h"
#include "core/how_many.h"

namespace shardbook::table {
namespace internal {
namespace {

struct Word {
  std::string_view name, meaning;
};

// First the columns of the tables, then the words of the pictures.
constexpr std::array<Word, 23> kWords = {{
    {"strategy",
     "How the training is split over devices. The link leads to the run, with "
     "its command and its pictures."},
    {"devices", "How many devices the run uses. Each is one rank."},
    {"step",
     "The time of one training step: virtual time on the cluster, or wall time "
     "on this machine where the cell says so."},
    {"speed-up",
     "How many times faster a step is than on one device. In brackets if one "
     "of the two runs does not fit in memory."},
    {"peak memory",
     "The most bytes in use at one time on the fullest device, the sum over "
     "all kinds. The run on shapes simulates it."},
    {"sent over",
     "Bytes that all devices send in a step over this kind of link."},
    {"sent",
     "Bytes that the busiest rank sends in a step. Broadcasts at the start are "
     "shared out over the steps."},
    {"idle",
     "The share of a step in which a device computes nothing, mean over the "
     "devices: bubble, exposed communication and rest."},
    {"world",
     "The kind of ranks and their number: threads of one process, processes "
     "that talk over gloo, or simulated ranks (sim)."},
    {"loss", "The mean loss of the first step and of the last one."},
    {"numbers",
     "The largest relative difference to a training on one device, over all "
     "parameters."},
    {"claims",
     "How many of a run's claims hold, of those that were measured: numbers, "
     "bytes, memory, time."},
    {"held",
     "Parameters, gradients and optimizer state as an update leaves them, and "
     "the activations that a forward keeps for its backward, of the fullest "
     "rank. Formulas predict them."},
    {"run", "A training that was run, with the same name in each set."},
    {"set", "The name under which runs were kept."},
    {"busy", "An operation runs on the queue."},
    {"exposed communication",
     "The queue waits for a message that is on the wire."},
    {"bubble",
     "The queue waits for a message that has not been sent: the sender is "
     "still computing, or waits itself."},
    {"rest",
     "The host has not given the device anything to do, or the queue waits for "
     "another queue of the device."},
    {"steady state",
     "Steps of a pipeline that does not flush, after it has filled and before "
     "it drains."},
    {"predicted",
     "The value of a formula of the chapter's page; of a peak, the result of "
     "the run on shapes."},
    {"counted", "What the program measured."},
    {"textbook",
     "A cluster on which a product takes its operations over one rate, a "
     "message latency plus bytes over bandwidth, and nothing else takes time. "
     "The pages derive steps for it."},
}};

std::string_view meaning_of(const std::string& word) {
  for (const Word& each : kWords) {
    if (word.rfind(each.name, 0) == 0) return each.meaning;
  }
  return "";
}

std::string capitalized(std::string text) {
  if (!text.empty()) {
    text[0] =
        static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  }
  return text;
}

std::string glossary_html() {
  std::string text =
      "<section id=\"words\"><h2>What the words mean</h2><p "
      "class=\"about\">At every instant of a step, the queue of operations on "
      "a device is busy, in a bubble, in exposed communication or at rest. "
      "These shares add up to the step.</p><dl>\n";
  for (const Word& word : kWords) {
    text += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n",
                        capitalized(std::string(word.name)), word.meaning);
  }
  return text + "</dl></section>\n";
}

// "What it costs to split a training: 106 runs, 65 simulated on clusters and 41
// trained here; all 292 claims hold."
std::string summary_html(const Runs& runs, const std::string& remarks) {
  const auto [failed, measured] = count_claims(runs);
  const Verdict mark = measured == 0 ? Verdict::kNotMeasured
                       : failed == 0 ? Verdict::kPassed
                                     : Verdict::kFailed;
  const std::size_t trained = trained_runs(runs).size();
  const std::size_t simulated = runs.size() - trained;
  const std::string parts =
      simulated == 0 || trained == 0
          ? ""
          : fmt::format(", {} simulated on clusters and {} trained here",
                        simulated, trained);
  return fmt::format(
      "<p class=\"summary\">What it costs to split a training: "
      "{}{}; {} {}.{}</p>\n",
      how_many(runs.size(), "run"), parts, sign_html(mark),
      verdict_text({failed, measured}),
      remarks.empty() ? ""
                      : " <span lang=\"en\">" + escape(remarks) + "</span>");
}

// The site has its own explorer (build_site.py): it knows this sentence.
std::string explorer_html(const ReportLinks& links) {
  if (links.book.empty()) return "";
  return "<p class=\"note\">A model of your own, planned in a browser: " +
         (links.explorer.empty() ? "<code>./shardbook explore</code>"
                                 : "<a href=\"" + escape(links.explorer) +
                                       "/index.html\">the explorer</a>") +
         "</p>\n";
}

// One element per run: a closed run's timeline is not decoded.
std::string data_html(const Runs& runs) {
  std::string text;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!has_timeline(runs[i])) continue;
    text += fmt::format("<script type=\"text/plain\" id=\"data-{}\">", i) +
            timeline_data(*runs[i].virtual_run->timeline) + "</script>\n";
  }
  return text;
}

// The runs of a group under its title: first what they buy, then the proofs.
std::string runs_html(const Runs& runs, const ReportLinks& links) {
  std::vector<RunGroup> groups = simulated_groups(runs);
  const Chosen trained = trained_runs(runs);
  if (!trained.empty()) groups.push_back({"Proof", trained});
  std::string text = "<section id=\"runs\"><h2>The runs</h2>\n";
  for (const RunGroup& group : groups) {
    text += "<h3>" + escape(title_of(group)) + "</h3>\n";
    for (const ProgramRun* run : group.runs) {
      text += run_html(*run, runs, runs.size() == 1, links.book);
    }
  }
  return text + "</section>\n";
}

// The sections of the page, in their order. A run alone needs no tables.
std::string body_html(const Runs& runs, const ReportLinks& links) {
  const std::string sections = runs_html(runs, links) + glossary_html();
  if (runs.size() == 1) return sections;
  const FirstLook look = first_look(runs);
  const std::string tables = are_compared(runs)
                                 ? compared_html(runs)
                                 : comparison_html(runs) +
                                       buys_html(runs, look.scatter_group) +
                                       proof_html(runs);
  return look.html + tables + sections;
}

std::string contents_html(const Runs& runs) {
  std::string text;
  const auto open = [&](const std::string& id, const std::string& title) {
    text += "<li><a href=\"#" + id + "\">" + escape(title) + "</a>";
  };
  const auto add = [&](const std::string& id, const std::string& title) {
    open(id, title);
    text += "</li>\n";
  };
  const std::vector<RunGroup> groups = simulated_groups(runs);
  const bool has_groups = runs.size() > 1 && !are_compared(runs);
  if (are_compared(runs)) add("compared", "Compared");
  if (are_sets(runs)) add("comparison", "Compared");
  if (has_groups && !groups.empty()) {
    open("buys", "What it buys");
    text += "<ul>\n";
    for (const RunGroup& group : groups) {
      add(id_of(group, runs), title_of(group));
    }
    text += "</ul></li>\n";
  }
  if (has_groups && !trained_runs(runs).empty()) add("proof", "Proof");
  add("runs", "The runs");
  add("words", "Words");
  return text;
}

void fill(std::string& page, const std::string& mark, const std::string& text) {
  const std::size_t at = page.find(mark);
  if (at != std::string::npos) page.replace(at, mark.size(), text);
}

}  // namespace

Unit unit_of(Unit (*choose)(double), const Chosen& runs,
             double (*value)(const ProgramRun& run)) {
  double least = 0;
  for (const ProgramRun* run : runs) {
    const double each = value(*run);
    if (each > 0 && (least == 0 || each < least)) least = each;
  }
  return choose(least);
}

std::string number_text(double value, const Unit& unit) {
  return value < 0 ? "\u2013" : pictures::text(value, {"", unit.size});
}

std::string open_table(const std::string& name,
                       const std::vector<Head>& heads) {
  std::string text = fmt::format(
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"{}\"><table><thead><tr>",
      escape(name));
  for (const Head& head : heads) {
    text += fmt::format("<th scope=\"col\" title=\"{}\">{}{}</th>",
                        meaning_of(head.word), capitalized(escape(head.word)),
                        head.unit.empty()
                            ? ""
                            : " <span class=\"unit\">" + head.unit + "</span>");
  }
  return text + "</tr></thead><tbody>\n";
}

std::string legend_html(
    const std::vector<std::pair<std::string, std::string>>& classes,
    const std::string& word) {
  std::string text = "<ul class=\"legend\">" + word;
  for (const auto& [css_class, title] : classes) {
    text += fmt::format(
        "<li><svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\">"
        "<rect class=\"{}\" width=\"10\" height=\"10\"/></svg>{}</li>",
        css_class, title);
  }
  return text + "</ul>\n";
}

}  // namespace internal

using namespace internal;

std::string report_html(const Runs& runs, const std::string& remarks,
                        const ReportLinks& links) {
  std::string page = page_template();
  fill(page, "/*STYLE*/", page_style());
  fill(page, "/*SCRIPT*/", page_script());
  fill(page, "<!--WORDS-->", page_words());
  fill(page, "<!--CONTENTS-->", contents_html(runs));
  fill(page, "<!--SUMMARY-->",
       summary_html(runs, remarks) + explorer_html(links));
  // The data first, so that no mark is searched for in the text of runs.
  fill(page, "<!--DATA-->", data_html(runs));
  fill(page, "<!--BODY-->", body_html(runs, links));
  return page;
}

}  // namespace shardbook::table
