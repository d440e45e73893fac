#include "sim/timeline_json.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
namespace shardbook::sim {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::size_t kMostEvents = 2000;   // of a queue
constexpr std::size_t kMostSamples = 1000;  // of memory
constexpr double kShortShare = 1.0 / 1000;  // of the step: about a pixel

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// Writes whole numbers without a fraction: shorter, and exact.
OrderedJson number(double value) {
  if (value == std::floor(value) && std::abs(value) < 9e15) {
    return static_cast<std::int64_t>(value);
  }
  return value;
}

std::vector<TimelineEvent> events_of(const RankTimeline& timeline,
                                     const std::string& queue) {
  std::vector<TimelineEvent> events;
  for (const TimelineEvent& event : timeline.events) {
    if (event.queue == queue) events.push_back(event);
  }
  return events;
}

// Joins events too short to be seen. In an interval of `shortest_s`, those of
// one category and label become one; those between them move behind it, so
// every class keeps its time.
std::vector<TimelineEvent> join_short(const std::vector<TimelineEvent>& events,
                                      double shortest_s) {
  std::vector<TimelineEvent> joined;
  std::vector<int> counts;
  std::size_t first = 0;  // of the interval, in `joined`
  double begin_s = -shortest_s;
  for (const TimelineEvent& event : events) {
    // Rounding must not split an interval that ends with an event
    if (event.end_s - begin_s > shortest_s * (1 + 1e-9)) {
      first = joined.size();
      begin_s = event.begin_s;
    }
    std::size_t at = first;
    while (at < joined.size() && (joined[at].category != event.category ||
                                  joined[at].label != event.label)) {
      ++at;
    }
    if (at == joined.size()) {
      joined.push_back(event);
      counts.push_back(1);
      continue;
    }
    const double length_s = event.end_s - event.begin_s;
    for (std::size_t behind = at + 1; behind < joined.size(); ++behind) {
      joined[behind].begin_s += length_s;
      joined[behind].end_s += length_s;
    }
    TimelineEvent& all = joined[at];
    all.name = fmt::format("{} operations", ++counts[at]);
    all.end_s += length_s;
    all.bytes += event.bytes;
    all.flops += event.flops;
    all.peer = -1;
    all.message = -1;
  }
  return joined;
}

// Keeps the fullest and the last sample of each short interval.
std::vector<MemorySample> thin_memory(const std::vector<MemorySample>& all,
                                      double shortest_s) {
  std::vector<MemorySample> kept;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    std::size_t fullest = begin;
    for (; end == begin || (end < all.size() &&
                            all[end].time_s - all[begin].time_s < shortest_s);
         ++end) {
      if (all[end].total() > all[fullest].total()) fullest = end;
    }
    kept.push_back(all[fullest]);
    if (all[end - 1].total() < all[fullest].total()) {
      kept.push_back(all[end - 1]);
    }
  }
  return kept;
}

class Writer {
 public:
  explicit Writer(const StepView& view) : view_(view) {
    for (const RankGroup& group : view.groups) {
      for (const MemorySample& sample : group.timeline.memory) {
        for (std::size_t k = 0; k < sample.bytes.size(); ++k) {
          used_[k] = used_[k] || sample.bytes[k] != 0;
        }
      }
    }
  }

  OrderedJson write() {
    OrderedJson groups = OrderedJson::array();
    for (const RankGroup& group : view_.groups) {
      if (groups.size() == kMostGroups) break;
      groups.push_back(group_json(group));
    }
    return {{"world_size", view_.world_size}, {"step_s", view_.step_s},
            {"num_steps", view_.num_steps},   {"ops", ops_},
            {"kinds", kinds_json()},          {"groups", std::move(groups)}};
  }

 private:
  OrderedJson group_json(const RankGroup& group) {
    OrderedJson queues = OrderedJson::array();
    for (const std::string& name : queue_names(group.timeline)) {
      std::vector<TimelineEvent> events = events_of(group.timeline, name);
      if (events.size() > kMostEvents) {
        events = join_short(events, kShortShare * view_.step_s);
      }
      OrderedJson list = OrderedJson::array();
      for (const TimelineEvent& event : events) list.push_back(row(event));
      queues.push_back({{"name", name}, {"events", std::move(list)}});
    }
    OrderedJson memory = OrderedJson::array();
    std::vector<MemorySample> samples = group.timeline.memory;
    if (samples.size() > kMostSamples) {
      samples = thin_memory(samples, kShortShare * view_.step_s);
    }
    for (const MemorySample& sample : samples) {
      OrderedJson values = {nanoseconds(sample.time_s)};
      for (std::size_t k = 0; k < sample.bytes.size(); ++k) {
        if (used_[k]) values.push_back(sample.bytes[k]);
      }
      memory.push_back(std::move(values));
    }
    return {{"ranks", ranks_json(group.ranks)},
            {"queues", std::move(queues)},
            {"memory", std::move(memory)}};
  }

  OrderedJson row(const TimelineEvent& event) {
    OrderedJson values = {op_number(event), nanoseconds(event.begin_s),
                          nanoseconds(event.end_s)};
    const bool message = event.peer >= 0 || event.message >= 0;
    if (message || event.flops != 0 || event.bytes != 0) {
      values.push_back(number(event.bytes));
    }
    if (message || event.flops != 0) values.push_back(number(event.flops));
    if (message) {
      values.push_back(event.peer);
      values.push_back(event.message);
    }
    return values;
  }

  std::size_t op_number(const TimelineEvent& event) {
    const auto [op, added] = op_numbers_.try_emplace(
        std::make_tuple(event.name, event.label, event.category), ops_.size());
    if (added) ops_.push_back({event.name, event.label, event.category});
    return op->second;
  }

  OrderedJson kinds_json() const {
    OrderedJson kinds = OrderedJson::array();
    for (std::size_t k = 0; k < used_.size(); ++k) {
      if (used_[k])
        kinds.push_back(memory_kind_name(static_cast<MemoryKind>(k)));
    }
    return kinds;
  }

  static OrderedJson ranks_json(const std::vector<int>& ranks) {
    OrderedJson runs = OrderedJson::array();
    for (const int rank : ranks) {
      if (!runs.empty() && runs.back()[1] == rank - 1) {
        runs.back()[1] = rank;
      } else {
        runs.push_back({rank, rank});
      }
    }
    return runs;
  }

  const StepView& view_;
  std::array<bool, kNumMemoryKinds> used_{};
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t>
      op_numbers_;
  OrderedJson ops_ = OrderedJson::array();
};

}  // namespace

std::string timeline_json(const std::vector<RankTimeline>& timelines) {
  const StepView view = last_step(timelines);
  return Writer(view).write().dump();
}

}  // namespace shardbook::sim
