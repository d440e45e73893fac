// The words of report.html, each with one definition, and tables whose columns
// are such words.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"

namespace shardbook::table::internal {
namespace {

using pictures::svg::escape;

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

}  // namespace shardbook::table::internal
