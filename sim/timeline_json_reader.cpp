#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "sim/json_object.h"
#include "sim/timeline_json.h"

namespace shardbook::sim {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMost = std::int64_t{1} << 62;
constexpr std::int64_t kMostRanks = 10'000'000;

// A JSON value with its path, for messages.

class Node {
 public:
  Node(const Json& value, std::string where)
      : value_(value), where_(std::move(where)) {}

  Node operator[](const char* key) const {
    SB_CHECK(value_.is_object(), where_, " is ", shown(),
             "; it has to be an object");
    SB_CHECK(value_.contains(key), where_, ".", key, " is missing");
    return {value_[key], where_ + "." + key};
  }

  std::size_t size() const {
    SB_CHECK(value_.is_array(), where_, " is ", shown(),
             "; it has to be a list");
    return value_.size();
  }

  Node at(std::size_t i) const {
    SB_CHECK(i < size(), where_, " has ", size(), " elements; it needs ",
             i + 1);
    return {value_[i], fmt::format("{}[{}]", where_, i)};
  }

  std::string text() const {
    SB_CHECK(value_.is_string(), where_, " is ", shown(),
             "; it has to be a string");
    return value_.get<std::string>();
  }

  std::int64_t whole(std::int64_t least, std::int64_t most) const {
    SB_CHECK(value_.is_number_integer() && value_ >= least && value_ <= most,
             where_, " is ", shown(), "; it has to be a whole number from ",
             least, " to ", most);
    return value_.get<std::int64_t>();
  }

  double positive() const {
    SB_CHECK(value_.is_number() && value_.get<double>() >= 0, where_, " is ",
             shown(), "; it has to be a number from 0 up");
    return value_.get<double>();
  }

  [[noreturn]] void fail(const std::string& rule) const {
    SB_FAIL(where_, " is ", shown(), "; ", rule);
  }

 private:
  std::string shown() const { return json_file::shown(value_); }

  const Json& value_;
  std::string where_;
};

std::vector<int> read_ranks(const Node& runs, int world_size) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::int64_t least = ranks.empty() ? 0 : ranks.back() + 1;
    const std::int64_t first = runs.at(i).at(0).whole(least, world_size - 1);
    const std::int64_t last = runs.at(i).at(1).whole(first, world_size - 1);
    for (std::int64_t rank = first; rank <= last; ++rank) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  if (ranks.empty()) runs.fail("it has to name a rank");
  return ranks;
}

TimelineEvent read_event(const Node& row, const Node& ops) {
  TimelineEvent event;
  const auto last_op = static_cast<std::int64_t>(ops.size()) - 1;
  const Node op = ops.at(static_cast<std::size_t>(row.at(0).whole(0, last_op)));
  event.name = op.at(0).text();
  event.label = op.at(1).text();
  event.category = op.at(2).text();
  const std::int64_t begin_ns = row.at(1).whole(0, kMost);
  event.begin_s = static_cast<double>(begin_ns) * 1e-9;
  event.end_s = static_cast<double>(row.at(2).whole(begin_ns, kMost)) * 1e-9;
  if (row.size() > 3) event.bytes = row.at(3).positive();
  if (row.size() > 4) event.flops = row.at(4).positive();
  if (row.size() > 5) {
    event.peer = static_cast<int>(row.at(5).whole(-1, kMostRanks));
  }
  if (row.size() > 6) event.message = row.at(6).whole(-1, kMost);
  return event;
}

std::vector<std::size_t> read_kinds(const Node& names) {
  std::vector<std::size_t> kinds;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::size_t k = 0;
    while (k < kNumMemoryKinds &&
           names.at(i).text() != memory_kind_name(static_cast<MemoryKind>(k))) {
      ++k;
    }
    if (k == kNumMemoryKinds)
      names.at(i).fail("there is no such kind of memory");
    kinds.push_back(k);
  }
  return kinds;
}

std::vector<MemorySample> read_memory(const Node& rows,
                                      const std::vector<std::size_t>& kinds) {
  std::vector<MemorySample> memory;
  std::int64_t time_ns = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    MemorySample sample;
    time_ns = rows.at(i).at(0).whole(time_ns, kMost);
    sample.time_s = static_cast<double>(time_ns) * 1e-9;
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      sample.bytes[kinds[k]] = rows.at(i).at(k + 1).whole(0, kMost);
    }
    memory.push_back(sample);
  }
  return memory;
}

RankGroup read_group(const Node& node, const Node& ops,
                     const std::vector<std::size_t>& kinds,
                     const StepView& view) {
  RankGroup group;
  group.ranks = read_ranks(node["ranks"], view.world_size);
  group.timeline.rank = group.ranks.front();
  group.timeline.steps = {0, view.step_s};
  const Node queues = node["queues"];
  for (std::size_t q = 0; q < queues.size(); ++q) {
    const std::string name = queues.at(q)["name"].text();
    const Node rows = queues.at(q)["events"];
    for (std::size_t i = 0; i < rows.size(); ++i) {
      group.timeline.events.push_back(read_event(rows.at(i), ops));
      group.timeline.events.back().queue = name;
    }
  }
  group.timeline.memory = read_memory(node["memory"], kinds);
  return group;
}

}  // namespace

StepView read_timeline_json(const std::string& text,
                            const std::string& source) {
  json_file::check_depth(text, source);
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    SB_FAIL(source, ": no JSON: the first mistake is at byte ", error.byte);
  } catch (const Json::out_of_range&) {
    SB_FAIL(source, ": no JSON that can be read: a number is too large");
  }
  const Node root(json, source);
  StepView view;
  view.world_size = static_cast<int>(root["world_size"].whole(0, kMostRanks));
  view.step_s = root["step_s"].positive();
  if (json.contains("num_steps")) {
    view.num_steps = static_cast<int>(root["num_steps"].whole(1, 1000));
  }
  const std::vector<std::size_t> kinds = read_kinds(root["kinds"]);
  const Node groups = root["groups"];
  std::size_t num_ranks = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    view.groups.push_back(read_group(groups.at(i), root["ops"], kinds, view));
    num_ranks += view.groups.back().ranks.size();
    SB_CHECK(num_ranks <= static_cast<std::size_t>(view.world_size), source,
             ".groups name ", num_ranks, " ranks of a world of ",
             view.world_size);
  }
  return view;
}

}  // namespace shardbook::sim
