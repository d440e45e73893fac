#include "sim/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/text_file.h"
#include "sim/timeline_step.h"

namespace shardbook::sim {
namespace {

using Json = nlohmann::ordered_json;

// The sender, the receiver, and the number of the message between them.
using Message = std::tuple<int, int, std::int64_t>;

// Threads of a rank: its steps, then its queues. Viewers take a thread 0 for
// the thread whose number is the process'.
constexpr int kStepsThread = 1;

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// Viewers round a thousand times this number to nanoseconds, or cut it off.
// With a tenth of one more, both give `ns`, also of 1000.99...
Json microseconds(std::int64_t ns) {
  if (ns % 1000 == 0) return ns / 1000;
  return (static_cast<double>(ns) + 0.1) / 1000;
}

// An event with rounded times: events that touch touch after rounding, too.
struct Slice {
  const TimelineEvent* event;
  std::int64_t begin_ns, end_ns;

  bool is_message() const { return event->category == "comm"; }
};

// The slices of one thread of the trace. The format wants them to nest: those
// that cross are lost.
struct Lane {
  std::vector<Slice> slices;
  std::vector<Slice> open;  // each within the one before

  /// Takes a slice that begins behind the others, if it has room here. An
  /// operation may lie within an operation. A message in flight beside another
  /// is not a part of it, even if it arrives first.
  bool take(const Slice& slice) {
    while (!open.empty() && open.back().end_ns <= slice.begin_ns) {
      open.pop_back();
    }
    if (!open.empty() && (slice.end_ns > open.back().end_ns ||
                          slice.is_message() || open.back().is_message())) {
      return false;
    }
    open.push_back(slice);
    slices.push_back(slice);
    return true;
  }
};

// The events of a queue in as few lanes as they need, by their begin.
std::vector<Lane> lanes_of(const RankTimeline& rank, const std::string& queue) {
  std::vector<Slice> slices;
  for (const TimelineEvent& event : rank.events) {
    if (event.queue != queue) continue;
    slices.push_back(
        {&event, nanoseconds(event.begin_s), nanoseconds(event.end_s)});
  }
  // At one time, first what has no length, then what is around the others
  const auto key = [](const Slice& slice) {
    const std::int64_t length = slice.end_ns - slice.begin_ns;
    return std::tuple(slice.begin_ns, length > 0, -length);
  };
  std::stable_sort(
      slices.begin(), slices.end(),
      [&key](const Slice& a, const Slice& b) { return key(a) < key(b); });
  std::vector<Lane> lanes;
  for (const Slice& slice : slices) {
    const bool is_taken =
        std::any_of(lanes.begin(), lanes.end(),
                    [&slice](Lane& lane) { return lane.take(slice); });
    if (!is_taken) lanes.emplace_back().take(slice);
  }
  return lanes;
}

bool is_message(const TimelineEvent& event, const char* name) {
  return event.name == name && event.peer >= 0 && event.message >= 0;
}

class Writer {
 public:
  // An arrow needs both ends.
  void number_arrows(const std::vector<RankTimeline>& timelines) {
    std::map<Message, int> ends;
    for (const RankTimeline& rank : timelines) {
      for (const TimelineEvent& event : rank.events) {
        if (is_message(event, "send"))
          ends[{rank.rank, event.peer, event.message}] |= 1;
        if (is_message(event, "recv"))
          ends[{event.peer, rank.rank, event.message}] |= 2;
      }
    }
    for (const auto& [message, seen] : ends) {
      if (seen == 3) arrows_.emplace(message, arrows_.size() + 1);
    }
  }

  /// The events of a rank, joined by commas.
  std::string events_of(const RankTimeline& rank) {
    text_.clear();
    name("process_name", rank.rank, kStepsThread,
         "rank " + std::to_string(rank.rank));
    put({{"ph", "M"},
         {"pid", rank.rank},
         {"name", "process_sort_index"},
         {"args", {{"sort_index", rank.rank}}}});
    write_steps(rank);
    int thread = kStepsThread;
    for (const std::string& queue : queue_names(rank)) {
      int number = 0;
      for (const Lane& lane : lanes_of(rank, queue)) {
        ++number;
        name_thread(
            rank.rank, ++thread,
            number == 1 ? queue : queue + " (" + std::to_string(number) + ")");
        for (const Slice& slice : lane.slices) {
          write_slice(rank.rank, thread, slice);
        }
      }
    }
    for (const MemorySample& sample : rank.memory) {
      write_memory(rank.rank, sample);
    }
    return std::move(text_);
  }

 private:
  /// "step 3"; "steps 3 to 988, left out".
  static std::string step_name(const RankTimeline& rank, std::size_t entry) {
    const auto number = static_cast<std::int64_t>(entry);
    const std::int64_t more = rank.num_left_out - 1;
    const std::size_t left_out = rank.first_left_out + 1;
    if (more < 0 || entry < left_out) return "step " + std::to_string(number);
    const std::string name = std::to_string(number + more);
    if (entry > left_out) return "step " + name;
    return "steps " + std::to_string(number) + " to " + name + ", left out";
  }

  void write_steps(const RankTimeline& rank) {
    if (rank.steps.size() < 2) return;
    name_thread(rank.rank, kStepsThread, "steps");
    for (std::size_t i = 1; i < rank.steps.size(); ++i) {
      const std::int64_t begin_ns = nanoseconds(rank.steps[i - 1]);
      Json json = at("X", rank.rank, kStepsThread, begin_ns);
      json["dur"] = microseconds(nanoseconds(rank.steps[i]) - begin_ns);
      json["name"] = step_name(rank, i);
      put(json);
    }
  }

  void write_slice(int rank, int thread, const Slice& slice) {
    const TimelineEvent& event = *slice.event;
    Json json = at("X", rank, thread, slice.begin_ns);
    json["dur"] = microseconds(slice.end_ns - slice.begin_ns);
    json["name"] = event.name;
    json["cat"] = event.category;
    if (!event.label.empty()) json["args"]["label"] = event.label;
    if (event.flops > 0) json["args"]["flops"] = event.flops;
    if (event.bytes > 0) json["args"]["bytes"] = event.bytes;
    if (event.peer >= 0) json["args"]["peer"] = event.peer;
    put(json);

    // The arrow leaves the send at its begin, and ends in the recv just before
    // its end: viewers look for the slice around that time.
    if (is_message(event, "send")) {
      write_arrow("s", {rank, event.peer, event.message},
                  at("s", rank, thread, slice.begin_ns));
    } else if (is_message(event, "recv")) {
      Json end =
          at("f", rank, thread, std::max(slice.begin_ns, slice.end_ns - 1));
      end["bp"] = "e";
      write_arrow("f", {event.peer, rank, event.message}, std::move(end));
    }
  }

  void write_arrow(const char* phase, const Message& message, Json json) {
    const auto arrow = arrows_.find(message);
    if (arrow == arrows_.end()) return;
    json["ph"] = phase;
    json["id"] = arrow->second;
    json["name"] = "message";
    json["cat"] = "message";
    put(json);
  }

  void write_memory(int rank, const MemorySample& sample) {
    Json json = {{"ph", "C"},
                 {"pid", rank},
                 {"ts", microseconds(nanoseconds(sample.time_s))},
                 {"name", "memory (bytes)"}};
    for (std::size_t k = 0; k < sample.bytes.size(); ++k) {
      json["args"][memory_kind_name(static_cast<MemoryKind>(k))] =
          sample.bytes[k];
    }
    put(json);
  }

  void name(const char* what, int rank, int thread, const std::string& text) {
    put({{"ph", "M"},
         {"pid", rank},
         {"tid", thread},
         {"name", what},
         {"args", {{"name", text}}}});
  }

  /// Viewers show threads in the order of their numbers.
  void name_thread(int rank, int thread, const std::string& text) {
    name("thread_name", rank, thread, text);
    put({{"ph", "M"},
         {"pid", rank},
         {"tid", thread},
         {"name", "thread_sort_index"},
         {"args", {{"sort_index", thread}}}});
  }

  static Json at(const char* phase, int rank, int thread, std::int64_t ns) {
    return {{"ph", phase},
            {"pid", rank},
            {"tid", thread},
            {"ts", microseconds(ns)}};
  }

  void put(const Json& event) {
    text_ += (text_.empty() ? "" : ",\n") + event.dump();
  }

  std::string text_;
  std::map<Message, std::size_t> arrows_;
};

}  // namespace

std::string chrome_events(const RankTimeline& timeline) {
  return Writer().events_of(timeline);
}

void write_chrome_trace(const std::string& path,
                        const std::vector<RankTimeline>& timelines) {
  Writer writer;
  writer.number_arrows(timelines);
  std::vector<std::string> events;
  for (const RankTimeline& rank : timelines) {
    events.push_back(writer.events_of(rank));
  }
  write_chrome_trace(path, events);
}

void write_chrome_trace(const std::string& path,
                        const std::vector<std::string>& events_by_rank) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* before = "\n";
  for (const std::string& events : events_by_rank) {
    text += std::exchange(before, ",\n") + events;
  }
  write_text_file(path, text + "\n]}\n", path + ": the trace");
}

}  // namespace shardbook::sim
