#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "chapters/table/internal/page.h"
#include "chapters/table/svg.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

using sim::RankGroup;
using sim::StepView;
using svg::escape;

double busy_share(const sim::RankTimeline& timeline, const std::string& queue,
                  double step_s) {
  double busy_s = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    const bool waits = event.category == "wait" || event.category == "idle";
    if (event.queue == queue && !waits) busy_s += event.end_s - event.begin_s;
  }
  return busy_s / step_s;
}

// Round times below the drawings.
std::string axis_html(double step_s) {
  std::string text = "<div class=\"axis\" aria-hidden=\"true\">";
  const double distance_s = sim::axis_distance(step_s, 5);
  for (int i = 0; distance_s > 0 && i * distance_s <= step_s; ++i) {
    // Near the end, the text stands before its mark.
    const bool late = i * distance_s > 0.8 * step_s;
    text += fmt::format("<span{} style=\"left:{:.2f}%\">{}</span>",
                        late ? " class=\"late\"" : "",
                        100 * i * distance_s / step_s,
                        i == 0 ? "0" : sim::seconds_text(i * distance_s));
  }
  return text + "</div>";
}

std::string swatch(const std::string& css_class, const std::string& title) {
  return fmt::format(
      "<li><svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\">"
      "<rect class=\"{}\" width=\"10\" height=\"10\"/></svg>{}</li>",
      css_class, title);
}

std::string categories_legend(const StepView& view) {
  static constexpr std::array<std::array<const char*, 2>, 6> kTitles = {
      {{"forward", "forward"},
       {"backward", "backward"},
       {"optimizer", "optimizer"},
       {"comm", "communication"},
       {"copy", "memory copy"},
       {"other", "other"}}};
  std::set<std::string> used;
  for (const RankGroup& group : view.groups) {
    for (const sim::TimelineEvent& event : group.timeline.events) {
      used.insert(svg::category_class(event.category));
    }
  }
  std::string text = "<ul class=\"legend\">";
  for (const auto& [css_class, title] : kTitles) {
    if (used.count(css_class) > 0) text += swatch(css_class, title);
  }
  return text + swatch("nothing", "idle") + "</ul>\n";
}

std::string lanes_html(std::size_t run_number, std::size_t g,
                       const RankGroup& group, double step_s) {
  std::string text = fmt::format("<h4>{}</h4><div class=\"lanes\">\n",
                                 sim::rank_list(group.ranks));
  const auto queues = sim::queue_names(group.timeline);
  for (std::size_t q = 0; q < queues.size(); ++q) {
    const double share = busy_share(group.timeline, queues[q], step_s);
    const std::string title = fmt::format(
        "{}, {}: busy for {:.0f} % of the step. Arrow keys move "
        "from one operation to the next.",
        sim::rank_list(group.ranks), queues[q], 100 * share);
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{:.0f} %"
        "</span>\n",
        escape(queues[q]),
        svg::lane(group.timeline, queues[q], step_s, title,
                  fmt::format("tabindex=\"0\" data-run=\"{}\" "
                              "data-group=\"{}\" data-queue=\"{}\"",
                              run_number, g, q)),
        100 * share);
  }
  return text + axis_html(step_s) + "</div>\n";
}

std::string hidden_ranks(const StepView& view) {
  std::size_t shown = 0;
  for (const RankGroup& group : view.groups) shown += group.ranks.size();
  const auto all = static_cast<std::size_t>(view.world_size);
  return shown >= all ? ""
                      : fmt::format(
                            "<p class=\"note\">{} more ranks differ "
                            "from these.</p>\n",
                            all - shown);
}

std::string timeline_html(std::size_t run_number, const StepView& view) {
  std::string text = fmt::format(
      "<figure class=\"timeline\"><figcaption><b>Timeline</b> of the last "
      "step, {} of virtual time; at the right, how much of it each queue is "
      "busy</figcaption>\n{}",
      sim::seconds_text(view.step_s), categories_legend(view));
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    text += lanes_html(run_number, g, view.groups[g], view.step_s);
  }
  return text + hidden_ranks(view) + "</figure>\n";
}

double total(const sim::MemorySample& sample) {
  double sum = 0;
  for (const std::int64_t bytes : sample.bytes) {
    sum += static_cast<double>(bytes);
  }
  return sum;
}

double peak(const RankGroup& group) {
  double most = 0;
  for (const sim::MemorySample& sample : group.timeline.memory) {
    most = std::max(most, total(sample));
  }
  return most;
}

std::string kinds_legend(const StepView& view) {
  std::string text = "<ul class=\"legend\">";
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    std::int64_t most = 0;
    for (const RankGroup& group : view.groups) {
      for (const sim::MemorySample& sample : group.timeline.memory) {
        most = std::max(most, sample.bytes[k]);
      }
    }
    if (most == 0) continue;
    std::string name = memory_kind_name(static_cast<MemoryKind>(k));
    const std::string css_class = "kind-" + name;
    std::replace(name.begin(), name.end(), '_', ' ');
    text +=
        swatch(css_class, fmt::format("{}, at most {}", name,
                                      format_bytes(static_cast<double>(most))));
  }
  return text + "</ul>\n";
}

std::string memory_html(std::size_t run_number, const StepView& view) {
  double most = 0;
  for (const RankGroup& group : view.groups) {
    most = std::max(most, peak(group));
  }
  if (most <= 0) return "";
  std::string text =
      "<figure class=\"memories\"><figcaption><b>Memory</b> in use during the "
      "step, by kind</figcaption>\n" +
      kinds_legend(view) + "<div class=\"plots\">\n";
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    const RankGroup& group = view.groups[g];
    const std::string who = sim::rank_list(group.ranks);
    const std::string title = fmt::format(
        "{}: memory over the step, at most {}. Arrow keys move "
        "through time.",
        who, format_bytes(peak(group)));
    text += fmt::format(
        "<div class=\"plot\"><h4>{}, at most {}</h4>"
        "<div class=\"scale\" aria-hidden=\"true\"><span>{}</span>"
        "<span>0</span></div>{}{}</div>\n",
        who, format_bytes(peak(group)), format_bytes(most),
        svg::memory(group.timeline, view.step_s, most, title,
                    fmt::format("tabindex=\"0\" data-run=\"{}\" "
                                "data-group=\"{}\"",
                                run_number, g)),
        axis_html(view.step_s));
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
      "<figure class=\"chart\"><figcaption><b>Bytes by link</b> per step"
      "</figcaption>\n<div class=\"bars\">";
  for (const sim::LinkBytes& link : run.links) {
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        escape(link.link), svg::bar(most > 0 ? link.bytes / most : 0, "comm"),
        format_bytes(link.bytes));
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
