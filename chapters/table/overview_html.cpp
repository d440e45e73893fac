// The top of report.html: tables of all runs, and step time against memory.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "chapters/pictures/svg.h"
#include "chapters/table/html.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

namespace svg = pictures::svg;

using pictures::svg::escape;

std::string open_table(const std::string& name,
                       const std::vector<const char*>& columns) {
  std::string text = fmt::format(
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"{}\"><table><thead><tr>",
      escape(name));
  for (const char* column : columns) {
    text += fmt::format("<th scope=\"col\">{}</th>", column);
  }
  return text + "</tr></thead><tbody>\n";
}

constexpr const char* kCloseTable = "</tbody></table></div>\n";

// Runs are numbered by their place in the list.
std::size_t number_of(const ProgramRun* run,
                      const std::vector<ProgramRun>& runs) {
  return static_cast<std::size_t>(run - runs.data());
}

std::string claim_cell(const ProgramRun& run, const Claim& claim) {
  // A value without a verdict has no sign.
  const bool plain =
      claim.verdict == Verdict::kNotMeasured && !claim.value.empty();
  const bool wall = &claim == &run.time && plain && !run.virtual_run;
  return fmt::format("<td>{} {}{}</td>", plain ? "" : sign_html(claim.verdict),
                     escape(claim.value), wall ? " wall" : "");
}

// ---- What it buys.

std::string step_cell(const ProgramRun& run, double most_s) {
  if (!run.virtual_run) return "<td>\u2013</td>";
  const double step_s = run.virtual_run->step_s.counted;
  return fmt::format("<td class=\"with-bar\">{}{}</td>",
                     sim::seconds_text(step_s),
                     svg::bar(most_s > 0 ? step_s / most_s : 0, "time"));
}

std::string or_dash(const std::string& text) {
  return text.empty() ? "\u2013" : text;
}

std::string speed_up_cell(const ProgramRun& run, const ProgramRun* one) {
  const std::string text = speed_up_text(run, one);
  const bool muted = !text.empty() && text[0] == '(';
  return fmt::format("<td{}>{}</td>", muted ? " class=\"muted\"" : "",
                     or_dash(text));
}

// A full bar is the device's memory; a run that does not fit is marked.
std::string memory_cell(const ProgramRun& run) {
  if (run.peak_bytes < 0) return "<td>\u2013</td>";
  const std::string peak = format_gigabytes(run.peak_bytes) + " GB";
  if (run.capacity_bytes <= 0) return "<td>" + peak + "</td>";
  return fmt::format(
      "<td class=\"with-bar\">{}{}{}</td>", peak,
      fits(run) ? "" : " <span class=\"over\">does not fit</span>",
      svg::bar(run.peak_bytes / run.capacity_bytes,
               fits(run) ? "space" : "over"));
}

std::string idle_cell(const ProgramRun& run) {
  if (!run.virtual_run) return "<td>\u2013</td>";
  const VirtualRun& time = *run.virtual_run;
  const double step_s = std::max(time.step_s.counted, 1e-12);
  const double bubble = time.bubble_s / step_s;
  const double exposed = time.exposed_comm_s / step_s;
  return fmt::format(
      "<td class=\"with-bar\">{:.1f} %{}</td>", 100 * time.idle_share,
      svg::stacked_bar({{bubble, "bubble"},
                        {exposed, "exposed"},
                        {time.idle_share - bubble - exposed, "rest"}}));
}

}  // namespace

std::string scatter_html(const RunGroup& group,
                         const std::vector<ProgramRun>& runs) {
  std::string points, capacity;
  int count = 0;
  for (const ProgramRun* run : group.runs) {
    if (!run->virtual_run || run->peak_bytes <= 0 ||
        run->virtual_run->step_s.counted <= 0) {
      continue;
    }
    ++count;
    points += fmt::format(
        "<a class=\"point{}\" href=\"#run-{}\" data-memory=\"{}\" "
        "data-time=\"{}\" title=\"{}: {}, {} GB\">{}</a>\n",
        fits(*run) ? "" : " over", number_of(run, runs), run->peak_bytes,
        run->virtual_run->step_s.counted, escape(run_name(*run)),
        sim::seconds_text(run->virtual_run->step_s.counted),
        format_gigabytes(run->peak_bytes), count);
    if (run->capacity_bytes > 0) {
      capacity = fmt::format("<span class=\"limit\" data-memory=\"{}\"></span>",
                             run->capacity_bytes);
    }
  }
  if (count < 2) return "";
  return "<figure class=\"scatter\"><figcaption><b>Step time against "
         "memory</b> lower is faster, further left is smaller; the numbers "
         "are the rows of the table" +
         std::string(
             capacity.empty() ? "" : ", the line is the memory of a device") +
         "</figcaption><div class=\"plane\">" + capacity + points +
         "</div><button type=\"button\" hidden></button></figure>\n";
}

namespace {

std::string group_html(const RunGroup& group,
                       const std::vector<ProgramRun>& runs) {
  double most_s = 0;
  for (const ProgramRun* run : group.runs) {
    if (run->virtual_run) {
      most_s = std::max(most_s, run->virtual_run->step_s.counted);
    }
  }
  const std::string title = group.title.empty() ? "Simulated" : group.title;
  std::string text = fmt::format(
      "<section class=\"group\"><h3>{}</h3><p class=\"about\">{}</p>\n",
      escape(title), escape(setting_of(*group.runs.front())));
  text += open_table(title, {"", "Strategy", "Devices", "Step", "Speed-up",
                             "Peak memory", "Sent per step", "Idle"});
  int row = 0;
  for (const ProgramRun* run : group.runs) {
    text += fmt::format("<tr><td>{}</td><th scope=\"row\">{}</th><td>{}</td>",
                        ++row, link_to(number_of(run, runs), *run),
                        run->world_size) +
            step_cell(*run, most_s) + speed_up_cell(*run, yardstick(group)) +
            memory_cell(*run) + "<td>" + or_dash(escape(links_text(*run))) +
            "</td>" + idle_cell(*run) + "</tr>\n";
  }
  return text + kCloseTable + scatter_html(group, runs) + "</section>\n";
}

}  // namespace

std::string proof_html(const std::vector<ProgramRun>& runs) {
  const std::vector<const ProgramRun*> trained = trained_runs(runs);
  if (trained.empty()) return "";
  std::string text =
      "<section id=\"proof\"><h2>Proof</h2><p class=\"about\">Small models, "
      "trained here. Each run makes four claims: a formula predicts, the "
      "program counts.</p>\n" +
      open_table("Proof", {"Strategy", "World", "Loss", "Numbers",
                           "Sent per step", "Held", "Peak", "Step"});
  for (const ProgramRun* run : trained) {
    text += fmt::format(
        "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td>",
        link_to(number_of(run, runs), *run), escape(world_name(*run)),
        run->loss.empty() ? "\u2013"
                          : run->loss.front() + " \u2192 " + run->loss.back());
    for (const Claim* claim : {&run->numbers, &run->bytes, &run->memory}) {
      text += claim_cell(*run, *claim);
    }
    text += fmt::format("<td>{}</td>", run->peak_bytes < 0
                                           ? "\u2013"
                                           : format_bytes(run->peak_bytes));
    text += claim_cell(*run, run->time) + "</tr>\n";
  }
  return text + kCloseTable +
         "<p class=\"note\">Step times are those of the cluster textbook, for "
         "which the pages derive them: a product takes its operations over one "
         "rate, a message latency plus bytes over bandwidth, and nothing else "
         "takes time.</p></section>\n";
}

std::string buys_html(const std::vector<ProgramRun>& runs) {
  const std::vector<RunGroup> groups = simulated_groups(runs);
  if (groups.empty()) return "";
  std::string text =
      "<section id=\"buys\"><h2>What it buys</h2><p class=\"about\">Large "
      "models on real clusters, simulated. The first row of a group is the "
      "yardstick of its speed-ups. A speed-up is in brackets if one of its "
      "two runs does not fit in memory.</p>\n";
  for (const RunGroup& group : groups) text += group_html(group, runs);
  return text + "</section>\n";
}

std::string comparison_html(const std::vector<ProgramRun>& runs) {
  std::set<std::string> sets;
  for (const ProgramRun& run : runs) sets.insert(run.set);
  if (sets.size() < 2) return "";
  std::string text =
      "<section id=\"comparison\"><h2>Compared</h2><p class=\"about\">In "
      "brackets: the ratio to the first set.</p>\n" +
      open_table("Compared", {"Run", "Set", "Step", "Peak memory",
                              "Sent per step", "Idle"});
  for (const ComparedRuns& line : compare_sets(runs)) {
    for (const ProgramRun* run : line.runs) {
      text +=
          fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td>",
                      link_to(number_of(run, runs), *run), escape(run->set));
      for (const auto& cell : compared_cells(*run, *line.runs.front())) {
        text += "<td>" + or_dash(cell) + "</td>";
      }
      text += "</tr>\n";
    }
  }
  return text + kCloseTable + "</section>\n";
}

std::string glossary_html() {
  return R"html(<section id="words"><h2>What the words mean</h2>
<p class="about">At every instant of a step, the queue of operations on a
device is in one of four states. Their shares add up to the step.</p>
<dl>
<dt>busy</dt><dd>An operation runs.</dd>
<dt>exposed communication</dt><dd>The queue waits for a message that is on the
wire.</dd>
<dt>bubble</dt><dd>The queue waits for a message that has not been sent: the
sender is still computing, or waits itself.</dd>
<dt>rest</dt><dd>The host has not given the device anything to do, or the queue
waits for another queue of the device.</dd>
<dt>idle</dt><dd>The time that is not busy: bubble, exposed communication and
rest.</dd>
<dt>held</dt><dd>Parameters, gradients and optimizer state as an update leaves
them, and the activations that a forward keeps for its backward. Formulas
predict them.</dd>
<dt>peak memory</dt><dd>The most bytes in use at one time, the sum over all
kinds: the top of the curve. The run on shapes simulates it.</dd>
<dt>steady state</dt><dd>Steps of a pipeline that does not flush, after it has
filled and before it drains.</dd>
</dl></section>
)html";
}

}  // namespace shardbook::table::internal
