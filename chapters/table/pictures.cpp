// The frames of drawings: the lanes of ranks on one axis of time, how full
// their memory is, bytes by link. Scripts fill them from the data of the runs.

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/pictures/svg.h"
#include "chapters/pictures/timeline_picture.h"
#include "chapters/table/internal/page.h"
#include "core/check.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

using pictures::memory_peak;
using sim::RankGroup;
using sim::StepView;

using Classes = std::vector<std::pair<std::string, std::string>>;

// Shares in percent, to one decimal, that add up to 100.0.
std::string shares_text(const sim::QueueShares& shares) {
  const auto tenths = [](double share) {
    return static_cast<int>(std::lround(1000 * share));
  };
  const int bubble = tenths(shares.bubble), exposed = tenths(shares.exposed),
            rest = tenths(shares.rest), busy = 1000 - bubble - exposed - rest;
  const auto text = [](int value) {
    return fmt::format("{:.1f} %", value / 10.0);
  };
  return fmt::format("busy {} + bubble {} + exposed communication {} + rest {}",
                     text(busy), text(bubble), text(exposed), text(rest));
}

bool has_messages(const StepView& view) {
  return std::ranges::any_of(view.groups, [](const RankGroup& group) {
    return std::ranges::any_of(group.timeline.events, [](const auto& event) {
      return event.message >= 0;
    });
  });
}

std::string tools_html(bool messages) {
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
         "<button type=\"button\" data-do=\"all\">All</button>" +
         (messages ? "<label><input type=\"checkbox\" class=\"messages\" "
                     "checked> messages</label>"
                   : "") +
         "<span>Drag to zoom, shift-drag to move, double-click for all. "
         "Pictures below this line move together.</span></div>\n";
}

// A lane that the script draws from queues of a rank: "0", or "1 2 3".
struct Lane {
  std::string queues;
  bool is_compute = false;
  std::string label, number;  // at its left and at its right
  std::string says;           // for screen readers
};

std::string lane_html(std::size_t run_number, std::size_t g, const Lane& lane) {
  return fmt::format(
      "<span class=\"label\">{}</span><svg class=\"lane{}\" role=\"img\" "
      "aria-label=\"{}. Arrow keys move from one operation to the next, + and "
      "- zoom.\" tabindex=\"0\" data-run=\"{}\" data-group=\"{}\" "
      "data-queues=\"{}\"></svg><span class=\"number\">{}</span>\n",
      escape(lane.label), lane.is_compute ? " compute" : "", escape(lane.says),
      run_number, g, lane.queues, lane.number);
}

std::string percent(double share) {
  return fmt::format("{:.0f} %", 100 * share);
}

// All queues of the ranks of one run.
std::string track_html(std::size_t run_number, std::size_t g,
                       const StepView& view) {
  const RankGroup& group = view.groups[g];
  const auto queues = sim::queue_names(group.timeline);
  const auto shares_of = [&](const std::string& queue) {
    return sim::queue_shares(group.timeline, queue, view.step_s);
  };
  const std::string who = sim::rank_list(group.ranks);
  std::string text = fmt::format(
      "<div class=\"track\"><b>{}</b> <span class=\"shares\">{}</span>"
      "<div class=\"lanes\">\n",
      who, shares_text(shares_of("compute")));
  for (std::size_t q = 0; q < queues.size(); ++q) {
    const sim::QueueShares shares = shares_of(queues[q]);
    text += lane_html(run_number, g,
                      {std::to_string(q), queues[q] == "compute", queues[q],
                       percent(shares.busy),
                       who + ", " + queues[q] + ": " + shares_text(shares)});
  }
  return text + "</div></div>\n";
}

// One of several runs: per rank a lane of computing, and one of messages.
std::string short_track_html(const ProgramRun& run, const Runs& runs) {
  const StepView& view = *run.virtual_run->timeline;
  std::string text = fmt::format(
      "<div class=\"track\">{} <span class=\"shares\">{}{}</span>"
      "<div class=\"lanes\">\n",
      link_to(run, runs, /*is_full=*/true), sim::seconds_text(view.step_s),
      view.num_steps == 1 ? "" : fmt::format(" for {} steps", view.num_steps));
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    const RankGroup& group = view.groups[g];
    const std::string who = sim::rank_list(group.ranks);
    const auto shares =
        sim::queue_shares(group.timeline, "compute", view.step_s);
    const auto queues = sim::queue_names(group.timeline);
    std::string others;
    for (std::size_t q = 1; q < queues.size(); ++q) {
      if (queues[q] == "host") continue;
      others += (others.empty() ? "" : " ") + std::to_string(q);
    }
    const std::size_t number = number_of(run, runs);
    const std::string says = full_name(run, runs) + ", " + who;
    text += lane_html(number, g,
                      {"0", true, who, percent(shares.busy),
                       says + ": " + shares_text(shares)});
    if (others.empty()) continue;
    text += lane_html(number, g, {others, false, "", "", says + ", messages"});
  }
  return text + "</div></div>\n";
}

constexpr const char* kAxis =
    "<div class=\"lanes\"><div class=\"axis\" "
    "aria-hidden=\"true\"></div></div>";

// The classes of all runs, in the order of the book, and idle time.
std::string timeline_legend(const Chosen& drawn) {
  std::set<std::pair<std::string, std::string>> used;
  for (const ProgramRun* run : drawn) {
    const Classes classes = pictures::classes_of(*run->virtual_run->timeline);
    used.insert(classes.begin(), classes.end());
  }
  Classes classes;
  for (const auto& [name, title] : sim::kEventClasses) {
    if (used.count({name, title}) > 0) classes.emplace_back(name, title);
  }
  classes.emplace_back("idle", "idle");
  return legend_html(classes);
}

std::string timeline_html(std::size_t run_number, const ProgramRun& run) {
  const StepView& view = *run.virtual_run->timeline;
  const std::string hidden = sim::hidden_text(view, view.groups.size());
  const bool messages = has_messages(view);
  std::string text = fmt::format(
      "<figure class=\"timeline\"><figcaption><b>Timeline</b> of {}, {} of "
      "virtual time. The numbers in boxes are micro-batches. The share at the "
      "right is the time in which a queue is busy. Ranks that are named "
      "together do the same.</figcaption>\n{}{}"
      "<div class=\"tracks\">\n",
      view.num_steps == 1
          ? "one step"
          : fmt::format("{} steps in the steady state", view.num_steps),
      sim::seconds_text(view.step_s), timeline_legend({&run}),
      tools_html(messages));
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    text += track_html(run_number, g, view);
  }
  if (messages) text += "<svg class=\"arrows\" aria-hidden=\"true\"></svg>";
  return text + kAxis + "</div>\n" +
         (hidden.empty() ? "" : "<p class=\"note\">" + hidden + ".</p>\n") +
         "</figure>\n";
}

std::string memory_html(std::size_t run_number, const StepView& view) {
  const double most = memory_peak(view);
  if (most <= 0) return "";
  std::string text =
      "<figure class=\"memories\"><figcaption><b>Memory</b> in use during the "
      "same time, by kind</figcaption>\n" +
      legend_html(pictures::memory_classes_of(view)) +
      "<div class=\"plots\">\n";
  for (std::size_t g = 0; g < view.groups.size(); ++g) {
    const RankGroup& group = view.groups[g];
    const std::string who = sim::rank_list(group.ranks);
    text += fmt::format(
        "<div class=\"plot\"><b>{0}, at most {1}</b>"
        "<div class=\"scale\" aria-hidden=\"true\"><span>{2}</span>"
        "<span>0</span></div><svg class=\"memory\" role=\"img\" "
        "aria-label=\"{0}: memory over the step, at most {1}. Arrow keys move "
        "through time.\" tabindex=\"0\" data-run=\"{3}\" data-group=\"{4}\" "
        "data-most=\"{5}\"></svg>"
        "<div class=\"axis\" aria-hidden=\"true\"></div></div>\n",
        who, format_bytes(memory_peak(group)), format_bytes(most), run_number,
        g, most);
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

// ---- The data of a timeline: columns of differences as JSON, deflated, in base64.
// ---- The differences repeat from layer to layer and from one micro-batch to the
// ---- next, so little is left of them.

using Json = nlohmann::ordered_json;
using Numbers = std::vector<std::int64_t>;

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

Numbers differences(Numbers values) {
  for (std::size_t i = values.size(); i-- > 1;) values[i] -= values[i - 1];
  return values;
}

// Names, labels and categories of events, each once.
class Operations {
 public:
  std::size_t number_of(const sim::TimelineEvent& event) {
    const auto [op, added] = numbers_.try_emplace(
        std::make_tuple(event.name, event.label, event.category), list_.size());
    if (added) list_.push_back({event.name, event.label, event.category});
    return op->second;
  }
  const Json& list() const { return list_; }

 private:
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t>
      numbers_;
  Json list_ = Json::array();
};

Json queue_json(const sim::RankTimeline& timeline, const std::string& name,
                Operations& operations) {
  Json queue = {{"name", name}};
  std::int64_t last_end = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != name) continue;
    const std::int64_t begin = nanoseconds(event.begin_s);
    const std::int64_t end = nanoseconds(event.end_s);
    queue["op"].push_back(operations.number_of(event));
    queue["gap"].push_back(begin - std::exchange(last_end, end));
    queue["length"].push_back(end - begin);
    queue["sent"].push_back(event.bytes);
    queue["flops"].push_back(event.flops);
    queue["peer"].push_back(event.peer);
    queue["message"].push_back(event.message);
  }
  // A column without a value is left out
  const auto drop = [&](const char* key, const Json& none) {
    const Json& column = queue[key];
    const auto found = std::ranges::count(column, none);
    if (static_cast<std::size_t>(found) == column.size()) queue.erase(key);
  };
  drop("sent", 0);
  drop("flops", 0);
  drop("peer", -1);
  drop("message", -1);
  return queue;
}

// Times, and the bytes of each kind.
Json memory_json(const sim::RankTimeline& timeline) {
  Json columns = Json::array();
  const auto add = [&](const auto& value_of) {
    Numbers values;
    for (const sim::MemorySample& sample : timeline.memory) {
      values.push_back(value_of(sample));
    }
    columns.push_back(differences(std::move(values)));
  };
  add([](const auto& sample) { return nanoseconds(sample.time_s); });
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    add([&](const auto& sample) { return sample.bytes[k]; });
  }
  return columns;
}

std::string deflated(const std::string& text) {
  uLongf size = compressBound(text.size());
  std::string bytes(size, '\0');
  SB_CHECK(compress(reinterpret_cast<Bytef*>(bytes.data()), &size,
                    reinterpret_cast<const Bytef*>(text.data()),
                    text.size()) == Z_OK,
           "report.html: zlib cannot compress a timeline");
  bytes.resize(size);
  return bytes;
}

}  // namespace

bool has_timeline(const ProgramRun& run) {
  return run.virtual_run && run.virtual_run->timeline &&
         run.virtual_run->timeline->step_s > 0;
}

std::string timelines_html(const std::string& title, const Chosen& drawn,
                           const Runs& runs) {
  const std::string setting = setting_of(*drawn.front());
  const bool is_same = std::ranges::all_of(drawn, [&](const ProgramRun* run) {
    return setting_of(*run) == setting;
  });
  std::string text = fmt::format(
      "<div class=\"view\"><figure class=\"timeline\"><figcaption><b>{}</b> "
      "{}<span>One step of each, on one axis of time</span></figcaption>\n{}{}"
      "<div class=\"tracks\">\n",
      escape(title), is_same ? escape(setting) + ". " : "",
      timeline_legend(drawn), tools_html(false));
  for (const ProgramRun* run : drawn) text += short_track_html(*run, runs);
  return text + kAxis + "</div></figure></div>\n" + other_trainings_html(drawn);
}

std::string pictures_html(const ProgramRun& run, const Runs& runs) {
  if (!run.virtual_run) return "";
  std::string text;
  if (has_timeline(run)) {
    const std::size_t number = number_of(run, runs);
    text = "<div class=\"view\">" + timeline_html(number, run) +
           memory_html(number, *run.virtual_run->timeline) + "</div>\n";
  }
  return text + links_html(*run.virtual_run);
}

std::string timeline_data(const sim::StepView& view) {
  Operations operations;
  Json groups = Json::array(), kinds = Json::array();
  for (const sim::RankGroup& group : view.groups) {
    Json queues = Json::array();
    for (const std::string& name : sim::queue_names(group.timeline)) {
      queues.push_back(queue_json(group.timeline, name, operations));
    }
    groups.push_back({{"rank", group.ranks.front()},
                      {"queues", std::move(queues)},
                      {"memory", memory_json(group.timeline)}});
  }
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    kinds.push_back(memory_kind_name(static_cast<MemoryKind>(k)));
  }
  const Json data = {{"length", nanoseconds(view.step_s)},
                     {"ops", operations.list()},
                     {"kinds", std::move(kinds)},
                     {"groups", std::move(groups)}};
  return pictures::svg::base64(deflated(data.dump()));
}

}  // namespace shardbook::table::internal
