// The frames of a run's drawings: the lanes of each rank, how the time of a
// step is spent, how full the memory is. The script timeline.js fills them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "chapters/pictures/svg.h"
#include "chapters/pictures/timeline_picture.h"
#include "chapters/table/internal/page.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

namespace svg = pictures::svg;

using pictures::classes_of;
using pictures::memory_classes_of;
using pictures::memory_peak;
using pictures::svg::escape;
using sim::RankGroup;
using sim::StepView;

std::string swatch(const std::string& css_class, const std::string& title) {
  return fmt::format(
      "<li><svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\">"
      "<rect class=\"{}\" width=\"10\" height=\"10\"/></svg>{}</li>",
      css_class, title);
}

using Classes = std::vector<std::pair<std::string, std::string>>;

std::string legend(const Classes& classes) {
  std::string text = "<ul class=\"legend\">";
  for (const auto& [css_class, title] : classes) {
    text += swatch(css_class, title);
  }
  return text + "</ul>\n";
}

// Shares in percent, to one decimal, that add up to 100.0.
std::string shares_text(const sim::QueueShares& shares) {
  const auto tenths = [](double share) {
    return static_cast<int>(std::lround(1000 * share));
  };
  const int busy = tenths(shares.busy), bubble = tenths(shares.bubble),
            exposed = tenths(shares.exposed);
  const auto text = [](int value) {
    return fmt::format("{:.1f} %", value / 10.0);
  };
  return fmt::format("busy {} + bubble {} + exposed communication {} + rest {}",
                     text(busy), text(bubble), text(exposed),
                     text(1000 - busy - bubble - exposed));
}

std::string tools_html(bool has_messages) {
  const auto button = [](const char* action, const char* sign,
                         const char* name) {
    return fmt::format(
        "<button type=\"button\" data-do=\"{}\" aria-label=\"{}\" "
        "title=\"{}\">{}</button>",
        action, name, name, sign);
  };
  return "<div class=\"tools\" hidden>" + button("in", "+", "zoom in") +
         button("out", "\u2212", "zoom out") +
         button("left", "\u2190", "earlier") +
         button("right", "\u2192", "later") +
         button("all", "All", "the whole step") +
         (has_messages ? "<label><input type=\"checkbox\" class=\"messages\" "
                         "checked> messages</label>"
                       : "") +
         "</div>\n";
}

std::string track_html(std::size_t g, const RankGroup& group, double step_s) {
  const auto queues = sim::queue_names(group.timeline);
  const std::string who = sim::rank_list(group.ranks);
  std::string text = fmt::format(
      "<div class=\"track\"><h4>{}</h4><p class=\"shares\">{}</p>"
      "<div class=\"lanes\">\n",
      who, shares_text(sim::queue_shares(group.timeline, "compute", step_s)));
  for (std::size_t q = 0; q < queues.size(); ++q) {
    const sim::QueueShares shares =
        sim::queue_shares(group.timeline, queues[q], step_s);
    text += fmt::format(
        "<span class=\"label\">{0}</span><svg class=\"lane{1}\" role=\"img\" "
        "aria-label=\"{2}, {0}: {3}. Arrow keys move from one operation to "
        "the next, + and - zoom.\" tabindex=\"0\" data-group=\"{4}\" "
        "data-queue=\"{5}\"></svg><span class=\"number\">{6:.0f} %</span>\n",
        escape(queues[q]), queues[q] == "compute" ? " compute" : "", who,
        shares_text(shares), g, q, 100 * shares.busy);
  }
  return text + "</div></div>\n";
}

bool has_messages(const StepView& view) {
  return std::any_of(
      view.groups.begin(), view.groups.end(), [](const RankGroup& group) {
        return std::any_of(
            group.timeline.events.begin(), group.timeline.events.end(),
            [](const auto& event) { return event.message >= 0; });
      });
}

std::string timeline_html(std::size_t run_number, const StepView& view) {
  const std::string hidden = sim::hidden_text(view, view.groups.size());
  const bool messages = has_messages(view);
  const std::string what =
      view.num_steps == 1
          ? "of one step"
          : fmt::format("of {} steps in the steady state", view.num_steps);
  std::string text = fmt::format(
      "<figure class=\"timeline\" data-run=\"{}\"><figcaption><b>Timeline</b> "
      "{}, {} of virtual time. The numbers in boxes are micro-batches. The "
      "share at the right is the time in which a queue is "
      "busy.</figcaption>\n{}{}"
      "<div class=\"tracks\">\n",
      run_number, what, sim::seconds_text(view.step_s),
      legend(classes_of(view)), tools_html(messages));
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    text += track_html(g, view.groups[g], view.step_s);
  }
  if (messages) text += "<svg class=\"arrows\" aria-hidden=\"true\"></svg>";
  return text +
         "<div class=\"lanes\"><div class=\"axis\" aria-hidden=\"true\">"
         "</div></div></div>\n" +
         (hidden.empty() ? "" : "<p class=\"note\">" + hidden + ".</p>\n") +
         "</figure>\n";
}

std::string memory_html(std::size_t run_number, const StepView& view) {
  const double most = memory_peak(view);
  if (most <= 0) return "";
  std::string text = fmt::format(
      "<figure class=\"memories\" data-run=\"{}\"><figcaption><b>Memory</b> in "
      "use during the same time, by kind</figcaption>\n{}{}"
      "<div class=\"plots\">\n",
      run_number, legend(memory_classes_of(view)), tools_html(false));
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    const RankGroup& group = view.groups[g];
    const std::string who = sim::rank_list(group.ranks);
    text += fmt::format(
        "<div class=\"plot\"><h4>{0}, at most {1}</h4>"
        "<div class=\"scale\" aria-hidden=\"true\"><span>{2}</span>"
        "<span>0</span></div><svg class=\"memory\" role=\"img\" "
        "aria-label=\"{0}: memory over the step, at most {1}. Arrow keys move "
        "through time.\" tabindex=\"0\" data-group=\"{3}\" data-most=\"{4}\">"
        "</svg><div class=\"axis\" aria-hidden=\"true\"></div></div>\n",
        who, format_bytes(memory_peak(group)), format_bytes(most), g, most);
  }
  return text + "</div></figure>\n";
}

std::string links_html(const VirtualRun& run) {
  if (run.links.empty()) return "";
  double most = 0;
  for (const sim::LinkBytes& link : run.links) {
    most = std::max(most, link.bytes);
  }
  std::string text =
      "<figure class=\"chart\"><figcaption><b>Bytes by link</b> per step, sent "
      "by all devices</figcaption>\n<div class=\"bars\">";
  for (const sim::LinkBytes& link : run.links) {
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        escape(link.link), svg::bar(most > 0 ? link.bytes / most : 0, "comm"),
        format_decimal_bytes(link.bytes));
  }
  return text + "</div></figure>\n";
}

}  // namespace

std::string pictures_html(std::size_t run_number, const ProgramRun& run) {
  if (!run.virtual_run) return "";
  const VirtualRun& virtual_run = *run.virtual_run;
  std::string text;
  if (virtual_run.timeline && virtual_run.timeline->step_s > 0) {
    text += timeline_html(run_number, *virtual_run.timeline) +
            memory_html(run_number, *virtual_run.timeline);
  }
  return text + links_html(virtual_run);
}

}  // namespace shardbook::table::internal
