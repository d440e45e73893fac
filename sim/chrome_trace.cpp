#include "sim/chrome_trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "sim/timeline_step.h"

namespace shardbook::sim {
namespace {

using Json = nlohmann::ordered_json;

// The sender, the receiver, and the number of the message between them.
using Message = std::tuple<int, int, std::int64_t>;

constexpr int kStepsThread = 0;  // queues follow

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
    std::map<std::string, int> threads;
    for (const std::string& queue : queue_names(rank)) {
      const int thread = kStepsThread + 1 + static_cast<int>(threads.size());
      threads[queue] = thread;
      name("thread_name", rank.rank, thread, queue);
    }
    for (const TimelineEvent& event : rank.events) {
      write_event(rank.rank, threads[event.queue], event);
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
    name("thread_name", rank.rank, kStepsThread, "steps");
    for (std::size_t i = 1; i < rank.steps.size(); ++i) {
      Json json = at("X", rank.rank, kStepsThread, rank.steps[i - 1]);
      json["dur"] = (rank.steps[i] - rank.steps[i - 1]) * 1e6;
      json["name"] = step_name(rank, i);
      put(json);
    }
  }

  void write_event(int rank, int thread, const TimelineEvent& event) {
    Json json = at("X", rank, thread, event.begin_s);
    json["dur"] = (event.end_s - event.begin_s) * 1e6;
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
                  at("s", rank, thread, event.begin_s));
    } else if (is_message(event, "recv")) {
      Json end =
          at("f", rank, thread, std::max(event.begin_s, event.end_s - 1e-9));
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
                 {"ts", sample.time_s * 1e6},
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

  static Json at(const char* phase, int rank, int thread, double time_s) {
    return {
        {"ph", phase}, {"pid", rank}, {"tid", thread}, {"ts", time_s * 1e6}};
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
  std::ofstream file(path, std::ios::binary);
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* before = "\n";
  for (const std::string& events : events_by_rank) {
    file << std::exchange(before, ",\n") << events;
  }
  file << "\n]}\n";
  file.close();
  SB_CHECK(file, path, ": the trace cannot be written: ", std::strerror(errno));
}

}  // namespace shardbook::sim
