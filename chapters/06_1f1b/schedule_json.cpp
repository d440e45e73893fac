#include "chapters/06_1f1b/schedule_json.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::pipeline {
namespace {

using json_file::shown;
using nlohmann::json;

constexpr int kMaxRanks = 1024;
constexpr int kMaxMicroBatches = 65536;
constexpr int kMaxSlots = 1 << 20;

constexpr const char* kForm =
    "; give F, B, I, W or U with a micro-batch, such as F0, B3.1 or F5&B2";

const std::map<std::string, VersionRule> kVersionNames = {
    {"newest", VersionRule::kNewest},
    {"first-stage", VersionRule::kFirstStage},
    {"delay-one", VersionRule::kDelayOne}};

/// Reads the digits at `*position` and moves past them; -1 for none or more
/// than seven.
int digits(const std::string& text, std::size_t* position) {
  int value = 0;
  const std::size_t first = *position;
  while (*position < text.size() && text[*position] >= '0' &&
         text[*position] <= '9' && *position - first < 8) {
    value = 10 * value + (text[(*position)++] - '0');
  }
  const std::size_t count = *position - first;
  return count >= 1 && count <= 7 ? value : -1;
}

/// Reads an action such as "B3.1"; false if it is none. Micro-batch -1: an
/// update with all gradients so far.
bool parse_action(const std::string& text, Action* action) {
  static const std::string letters = "FBIWU";
  const std::size_t kind = text.empty() ? letters.npos : letters.find(text[0]);
  if (kind == letters.npos) return false;
  action->kind = static_cast<ActionKind>(kind);
  action->micro_batch = -1;
  std::size_t position = 1;
  const bool is_bare = position == text.size() || text[position] == '.';
  if (is_bare && action->kind != ActionKind::kUpdate) return false;
  if (!is_bare) {
    action->micro_batch = digits(text, &position);
    if (action->micro_batch < 0) return false;
  }
  if (position < text.size() && text[position] == '.') {
    action->chunk = digits(text, &++position);
  }
  return position == text.size() && action->chunk >= 0;
}

/// The last micro-batch whose gradient of the chunk's weights is complete.
int last_gradient(const std::vector<Action>& list, int chunk) {
  int last = -1;
  for (const Action& each : list) {
    const bool is_gradient = each.kind == ActionKind::kBackward ||
                             each.kind == ActionKind::kBackwardWeight;
    if (is_gradient && each.chunk == chunk) {
      last = std::max(last, each.micro_batch);
    }
  }
  return last;
}

class Reader {
 public:
  Reader(const json& object, std::string label)
      : object_(object), label_(std::move(label)) {}

  Schedule read() {
    check_keys();
    s_.name = read_name();
    s_.num_micro_batches =
        whole(need("micro_batches"), "micro_batches", 1, kMaxMicroBatches);
    const json& ranks = list(need("ranks"), "ranks", kMaxRanks);
    s_.num_ranks = static_cast<int>(ranks.size());
    read_routes();
    for (int rank = 0; rank < s_.num_ranks; ++rank) {
      s_.actions.push_back(
          read_actions(ranks[at(rank)], "ranks[" + std::to_string(rank) + "]"));
    }
    read_versions();
    return s_;
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    SB_FAIL(label_, ": ", parts...);
  }

  void check_keys() const {
    if (!object_.is_object()) {
      fail(shown(object_),
           "; give an object with \"micro_batches\" and \"ranks\"");
    }
    static const std::vector<std::string> known = {
        "name",     "micro_batches",         "ranks", "routes", "route_of",
        "versions", "micro_batches_per_step"};
    for (const auto& [key, value] : object_.items()) {
      if (!key.empty() && key[0] == '_') continue;
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        fail("unknown key ", shown(json(key)),
             "; known are name, micro_batches, ranks, routes, route_of, "
             "versions, micro_batches_per_step");
      }
    }
  }

  const json& need(const char* key) const {
    if (!object_.contains(key)) fail("key \"", key, "\" is missing");
    return object_[key];
  }

  int whole(const json& value, const std::string& key, int least,
            int most) const {
    if (!value.is_number_integer() || value < least || value > most) {
      fail(key, " is ", shown(value), "; give a whole number from ", least,
           " to ", most);
    }
    return value.get<int>();
  }

  const json& list(const json& value, const std::string& key, int most) const {
    if (!value.is_array() || value.empty() || value.size() > at(most)) {
      fail(key, " is ", shown(value), "; give a list of 1 to ", most);
    }
    return value;
  }

  std::string text(const json& value, const std::string& key) const {
    if (!value.is_string()) fail(key, " is ", shown(value), "; give a string");
    return value.get<std::string>();
  }

  std::string read_name() const {
    if (!object_.contains("name")) return "unnamed";
    const std::string name = text(object_["name"], "name");
    const bool is_plain = std::all_of(name.begin(), name.end(), [](char c) {
      return c >= ' ' && c <= '~' && c != '\'';
    });
    if (name.empty() || name.size() > 40 || !is_plain) {
      fail("name is ", shown(name), "; give 1 to 40 plain characters");
    }
    return name;
  }

  /// "2" or "2.1".
  Place read_place(const json& value, const std::string& key) const {
    const std::string place = text(value, key);
    std::size_t position = 0;
    Place result{digits(place, &position), 0};
    if (position < place.size() && place[position] == '.') {
      result.chunk = digits(place, &++position);
    }
    if (position != place.size() || result.rank < 0 || result.chunk < 0 ||
        result.rank >= s_.num_ranks || result.chunk >= kMaxRanks) {
      fail(key, " is ", shown(value), "; give a rank below ", s_.num_ranks,
           ", and a chunk when it is not 0: \"0.1\"");
    }
    return result;
  }

  void read_routes() {
    s_.route_of.assign(at(s_.num_micro_batches), 0);
    if (object_.contains("routes")) {
      const json& routes = list(object_["routes"], "routes", 256);
      for (std::size_t i = 0; i < routes.size(); ++i) {
        const std::string key = "routes[" + std::to_string(i) + "]";
        Route route;
        for (const json& place : list(routes[i], key, kMaxRanks)) {
          route.push_back(read_place(
              place, key + "[" + std::to_string(route.size()) + "]"));
        }
        s_.routes.push_back(route);
      }
    } else {
      s_.routes.emplace_back();
      for (int rank = 0; rank < s_.num_ranks; ++rank) {
        s_.routes[0].push_back({rank, 0});
      }
    }
    s_.num_stages = static_cast<int>(s_.routes[0].size());
    check_size();
    if (!object_.contains("route_of")) return;
    const json& ways = list(object_["route_of"], "route_of", kMaxMicroBatches);
    s_.route_of.clear();
    for (const json& each : ways) {
      s_.route_of.push_back(
          whole(each, "route_of[" + std::to_string(s_.route_of.size()) + "]", 0,
                static_cast<int>(s_.routes.size()) - 1));
    }
  }

  void check_size() const {
    std::vector<int> chunks(at(s_.num_ranks), 0);
    for (const Route& route : s_.routes) {
      for (const Place& place : route) {
        int& count = chunks[at(place.rank)];
        count = std::max(count, place.chunk + 1);
      }
    }
    std::int64_t slots = 0;
    for (const int count : chunks) slots += count;
    slots *= s_.num_micro_batches;
    if (slots > kMaxSlots) {
      fail(slots, " chunks times micro-batches; give at most ", kMaxSlots);
    }
  }

  std::vector<Action> read_actions(const json& value,
                                   const std::string& key) const {
    std::istringstream words(text(value, key));
    std::vector<Action> result;
    for (std::string word; words >> word;) {
      std::size_t begin = 0;
      // One action, or the two of "F5&B2"
      for (bool is_last = false; !is_last;) {
        const std::size_t end = std::min(word.find('&', begin), word.size());
        is_last = end == word.size();
        Action action;
        if (!parse_action(word.substr(begin, end - begin), &action)) {
          fail(key, ", action ", result.size(), ": ", shown(word), kForm);
        }
        if (action.micro_batch < 0) {
          action.micro_batch = last_gradient(result, action.chunk);
        }
        action.overlaps_next = !is_last;
        result.push_back(action);
        begin = end + 1;
      }
    }
    return result;
  }

  void read_versions() {
    for (const auto& actions : s_.actions) {
      for (const Action& each : actions) {
        if (each.kind == ActionKind::kUpdate) s_.flushes = false;
      }
    }
    s_.micro_batches_per_step = s_.flushes ? s_.num_micro_batches : 1;
    if (object_.contains("versions")) {
      const std::string name = text(object_["versions"], "versions");
      const auto found = kVersionNames.find(name);
      if (found == kVersionNames.end()) {
        fail("versions is ", shown(name),
             "; give newest, first-stage or delay-one");
      }
      s_.versions = found->second;
    }
    if (object_.contains("micro_batches_per_step")) {
      s_.micro_batches_per_step =
          whole(object_["micro_batches_per_step"], "micro_batches_per_step", 1,
                s_.num_micro_batches);
    }
  }

  const json& object_;
  std::string label_;
  Schedule s_;
};

std::string place_text(const Place& place) {
  return std::to_string(place.rank) +
         (place.chunk == 0 ? "" : "." + std::to_string(place.chunk));
}

bool is_default(const std::vector<Route>& routes, int num_ranks) {
  if (routes.size() != 1 || routes[0].size() != at(num_ranks)) return false;
  for (int stage = 0; stage < num_ranks; ++stage) {
    const Place& place = routes[0][at(stage)];
    if (place.rank != stage || place.chunk != 0) return false;
  }
  return true;
}

}  // namespace

Schedule schedule_from_json(const std::string& text, const std::string& label) {
  json_file::check_depth(text, label);
  json object;
  try {
    object = json::parse(text);
  } catch (const json::parse_error& error) {
    SB_FAIL(label, ": no JSON: the first mistake is at byte ", error.byte);
  } catch (const json::out_of_range&) {
    SB_FAIL(label, ": no JSON that can be read: a number is too large");
  }
  Schedule schedule = Reader(object, label).read();
  try {
    check(schedule);
  } catch (const Error& error) {
    SB_FAIL(label, ": ", error.what());
  }
  return schedule;
}

Schedule read_schedule(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  SB_CHECK(stream.is_open() && !text.str().empty(), file,
           ": cannot be read, or is empty");
  return schedule_from_json(text.str(), file);
}

std::string to_json(const Schedule& schedule) {
  nlohmann::ordered_json object;
  object["name"] = schedule.name;
  object["micro_batches"] = schedule.num_micro_batches;
  if (!is_default(schedule.routes, schedule.num_ranks)) {
    for (const Route& route : schedule.routes) {
      nlohmann::ordered_json places;
      for (const Place& place : route) places.push_back(place_text(place));
      object["routes"].push_back(places);
    }
    object["route_of"] = schedule.route_of;
  }
  if (!schedule.flushes) {
    for (const auto& [name, rule] : kVersionNames) {
      if (rule == schedule.versions) object["versions"] = name;
    }
    object["micro_batches_per_step"] = schedule.micro_batches_per_step;
  }
  for (const std::vector<Action>& list : schedule.actions) {
    std::string text;
    for (const Action& each : list) {
      text += to_string(each) + (each.overlaps_next ? "&" : " ");
    }
    if (!text.empty()) text.pop_back();
    object["ranks"].push_back(text);
  }
  return object.dump(2) + "\n";
}

}  // namespace shardbook::pipeline
