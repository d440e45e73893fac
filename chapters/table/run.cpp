#include "chapters/table/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "core/check.h"
#include "core/how_many.h"
#include "sim/cluster.h"
#include "sim/json_object.h"
#include "sim/timeline_json.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using Json = nlohmann::ordered_json;
using json_file::shown;

// Looks values up by paths such as "options.world_size", and names file and path
// when one is missing or of the wrong type.
class JsonReader {
 public:
  JsonReader(const Json& object, std::string source)
      : object_(object), source_(std::move(source)) {}

  // The value, or null when it is not there.
  const Json& at(std::string path) const {
    static const Json kMissing;
    std::ranges::replace(path, '.', '/');
    const Json::json_pointer pointer("/" + path);
    return object_.contains(pointer) ? object_[pointer] : kMissing;
  }

  std::string text(const std::string& path) const {
    return check(path, require(path).is_string(), "a string");
  }

  std::int64_t count(const std::string& path) const {
    const Json& value = require(path);
    return check(path, value.is_number_integer() && value >= 0,
                 "a whole number from 0 up");
  }

  std::optional<double> number(const std::string& path) const {
    if (at(path).is_null()) return std::nullopt;
    return check(path, at(path).is_number(), "a number").get<double>();
  }

  // A number from 0 up, if there is one.
  std::optional<double> amount(const std::string& path) const {
    const auto value = number(path);
    check(path, value.value_or(0) >= 0, "a number from 0 up");
    return value;
  }

  // The words at `paths` that are there, joined by commas.
  std::string words(const std::vector<std::string>& paths) const {
    std::vector<std::string> words;
    for (const std::string& path : paths) {
      if (at(path).is_string()) words.push_back(at(path));
    }
    return fmt::format("{}", fmt::join(words, ", "));
  }

  // Whether there is an object.
  bool object(const std::string& path) const {
    const bool is_there = !at(path).is_null();
    check(path, !is_there || at(path).is_object(), "an object or null");
    return is_there;
  }

  // The elements of an array; none when it is missing.
  std::vector<Json> list(const std::string& path) const {
    if (at(path).is_null()) return {};
    return check(path, at(path).is_array(), "a list with one element per rank")
        .get<std::vector<Json>>();
  }

  // Members of a pair {"predicted": ..., "counted": ...} at `path`.
  double member(const Json& pair, const char* key,
                const std::string& path) const {
    SB_CHECK(pair.is_object() && pair.contains(key), where(path), " has no ",
             key, " number of bytes");
    const Json& value = pair[key];
    // An average over ranks may be a fraction of a byte.
    SB_CHECK(value.is_number() && value >= 0 && value < 9e18, where(path), ".",
             key, " is ", shown(value),
             "; it has to be a number of bytes from 0 up");
    return std::round(value.get<double>());
  }

 private:
  const Json& require(const std::string& path) const {
    SB_CHECK(!at(path).is_null(), where(path), " is missing");
    return at(path);
  }

  const Json& check(const std::string& path, bool is_right,
                    const char* what) const {
    SB_CHECK(is_right, where(path), " is ", shown(at(path)), "; it has to be ",
             what);
    return at(path);
  }

  std::string where(const std::string& path) const {
    return source_ + ": " + path;
  }

  const Json& object_;
  std::string source_;
};

/// A model given as the text of its config, in words: "gpt2 (n_embd 2048,
/// n_layer 24)".
std::string readable_model(const std::string& setting) {
  const std::size_t end = setting.rfind('}');
  if (setting.empty() || setting[0] != '{' || end == std::string::npos ||
      json_file::is_too_deep(setting)) {
    return setting;
  }
  const Json config = Json::parse(setting.substr(0, end + 1), nullptr,
                                  /*allow_exceptions=*/false);
  if (!config.is_object()) return setting;
  std::vector<std::string> sizes;
  for (const auto& [key, value] : config.items()) {
    if (key != "model_type") sizes.push_back(key + " " + value.dump());
  }
  return fmt::format("{} ({}){}", config.value("model_type", "gpt2"),
                     fmt::join(sizes, ", "), setting.substr(end + 1));
}

Verdict read_verdict(const JsonReader& reader, const std::string& claim) {
  const std::string path = "claims." + claim;
  if (reader.at(path).is_null()) return Verdict::kNotMeasured;
  const std::string text = reader.text(path);
  return text == "passed"   ? Verdict::kPassed
         : text == "failed" ? Verdict::kFailed
                            : Verdict::kNotMeasured;
}

void read_numbers(const JsonReader& reader, ProgramRun& run) {
  Claim& claim = run.numbers;
  claim.verdict = read_verdict(reader, "numbers");
  const auto relative = reader.number("parity.max_rel");
  // Without a comparison, a difference of 0 means nothing.
  if (relative && claim.verdict != Verdict::kNotMeasured) {
    run.difference = *relative;
    claim.value = format_difference(*relative);
  }
  if (const auto tolerance = reader.number("parity.tolerance")) {
    run.tolerance = fmt::format("{:.1e}", *tolerance);
  }
  claim.failure = fmt::format(
      "the largest relative difference to one device is {}, allowed is {}",
      relative ? format_difference(*relative) : "not a number",
      run.tolerance.empty() ? "not stated" : run.tolerance);
}

// Both members of the pair at `path`. The one under `key` may be null, or
// missing where it is not needed.
Figure read_figure(const JsonReader& reader, const Json& pair,
                   const std::string& path, const char* key, bool needs_it) {
  Figure figure;
  figure.counted = reader.member(pair, "counted", path);
  if (pair.contains(key) ? !pair[key].is_null() : needs_it) {
    figure.predicted = reader.member(pair, key, path);
  }
  return figure;
}

std::vector<RankBill> read_bills(const JsonReader& reader) {
  std::vector<RankBill> bills;
  // The bill of each rank, and what `list` has for it
  const auto for_each_rank = [&](const char* list, auto read) {
    const std::vector<Json> ranks = reader.list(list);
    bills.resize(std::max(bills.size(), ranks.size()));
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      read(bills[r], ranks[r], fmt::format("{}[{}]", list, r));
    }
  };
  const auto read_kinds = [&](const char* list, auto RankBill::*kinds,
                              const char* key) {
    for_each_rank(
        list, [&](RankBill& bill, const Json& rank, const std::string& path) {
          for (const auto& [kind, pair] : rank.items()) {
            (bill.*kinds)
                .emplace_back(kind, read_figure(reader, pair, path + "." + kind,
                                                key, false));
          }
        });
  };
  for_each_rank(
      "bytes", [&](RankBill& bill, const Json& rank, const std::string& path) {
        bill.sent = read_figure(reader, rank, path, "predicted", true);
      });
  read_kinds("held_memory", &RankBill::held, "predicted");
  read_kinds("peak_memory", &RankBill::peak, "simulated");
  return bills;
}

// Adds "rank 1: 96 B counted, 64 B predicted" where the two differ.
void add_difference(std::string& failure, const std::string& what,
                    const Figure& figure) {
  if (figure.predicted < 0 || figure.predicted == figure.counted) return;
  failure += fmt::format("{}{}: {:.0f} B counted, {:.0f} B predicted",
                         failure.empty() ? "" : "; ", what, figure.counted,
                         figure.predicted);
}

void read_bytes(const JsonReader& reader, ProgramRun& run) {
  run.bytes.verdict = read_verdict(reader, "bytes");
  if (reader.list("bytes").empty()) return;
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const Figure& sent = run.ranks[r].sent;
    add_difference(run.bytes.failure, fmt::format("rank {}", r), sent);
    run.sent_bytes = std::max(run.sent_bytes, sent.counted);
  }
  run.bytes.value = format_bytes(sent_per_step(run));
}

// The peak of a rank is its "total" where it states one; else the kinds' sum.
double peak_of(const RankBill& bill) {
  double sum = 0;
  for (const auto& [kind, peak] : bill.peak) {
    if (kind == "total") return peak.counted;
    sum += peak.counted;
  }
  return sum;
}

void read_memory(const JsonReader& reader, ProgramRun& run) {
  run.memory.verdict = read_verdict(reader, "memory");
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    double sum = 0;
    for (const auto& [kind, figure] : run.ranks[r].held) {
      add_difference(run.memory.failure, fmt::format("rank {} {}", r, kind),
                     figure);
      sum += figure.counted;
    }
    if (!run.ranks[r].held.empty()) {
      run.held_bytes = std::max(run.held_bytes, sum);
    }
    if (run.ranks[r].peak.empty()) continue;
    run.peak_bytes = std::max(run.peak_bytes, peak_of(run.ranks[r]));
  }
  if (run.held_bytes >= 0) run.memory.value = format_bytes(run.held_bytes);
}

// The devices' memory: stated by the run, or else that of its cluster.
double read_capacity(const JsonReader& reader, const ProgramRun& run) {
  if (const auto stated = reader.amount("capacity_bytes")) return *stated;
  if (!run.virtual_run || run.virtual_run->cluster.empty()) return 0;
  try {
    return static_cast<double>(
        sim::Cluster::read(run.virtual_run->cluster).device.memory_bytes);
  } catch (const Error&) {
    return 0;  // the file of the cluster is not here
  }
}

// "32 x 512 tokens", "120 images".
std::string read_samples(const JsonReader& reader) {
  if (reader.at("options.batch").is_null()) return "";
  const std::int64_t batch = reader.count("options.batch");
  const std::string model = reader.words({"options.model"});
  const bool images =
      model == "cifar" || model.find("resnet") != std::string::npos;
  if (images) {
    const std::string size = reader.words({"options.image_size"});
    return how_many(batch, "image") +
           (size.empty() ? "" : fmt::format(" of {0} x {0}", size));
  }
  if (reader.at("options.seq").is_null()) return "";
  return fmt::format("{} x {} tokens", batch, reader.count("options.seq"));
}

std::optional<VirtualRun> read_virtual(const JsonReader& reader,
                                       const std::string& source) {
  if (!reader.object("virtual")) return std::nullopt;
  VirtualRun run;
  run.cluster = reader.words({"virtual.cluster"});
  run.trust = reader.words({"virtual.trust"});
  // GPUs keep no clock of virtual time
  run.step_s.counted =
      reader.amount("virtual.step_s.counted")
          .value_or(reader.amount("virtual.step_s.simulated").value_or(0));
  run.step_s.predicted =
      reader.amount("virtual.step_s.closed_form").value_or(-1);
  run.idle_share = reader.amount("virtual.idle_share").value_or(0);
  run.exposed_comm_s = reader.amount("virtual.exposed_comm_s").value_or(0);
  run.bubble_s = reader.amount("virtual.bubble_s").value_or(0);
  for (const Json& link : reader.list("virtual.links")) {
    const JsonReader one(link, source + ": virtual.links");
    run.links.push_back({one.text("link"), one.amount("bytes").value_or(0)});
  }
  const Json& timeline = reader.at("virtual.timeline");
  if (!timeline.is_null()) {
    run.timeline =
        sim::read_timeline_json(timeline.dump(), source + ": virtual.timeline");
  }
  return run;
}

SweepTime read_time(const Json& object, const std::string& source) {
  const JsonReader reader(object, source);
  SweepTime time;
  if (!reader.at("split_size").is_null()) {
    time.split_size = reader.count("split_size");
  }
  time.wall_s = reader.amount("wall_s.mean").value_or(-1);
  time.wall_sd_s = reader.amount("wall_s.sd").value_or(0);
  time.virtual_s = reader.amount("virtual_s").value_or(-1);
  return time;
}

std::optional<Sweep> read_sweep(const JsonReader& reader,
                                const std::string& source) {
  if (!reader.object("sweep")) return std::nullopt;
  Sweep sweep;
  sweep.repeats = reader.count("sweep.repeats");
  sweep.cluster = reader.words({"sweep.cluster"});
  sweep.single =
      read_time(reader.at("sweep.single"), source + ": sweep.single");
  sweep.naive = read_time(reader.at("sweep.model_parallel"),
                          source + ": sweep.model_parallel");
  for (const Json& point : reader.list("sweep.pipeline")) {
    sweep.pipelined.push_back(read_time(point, source + ": sweep.pipeline"));
  }
  SB_CHECK(!sweep.pipelined.empty(), source,
           ": sweep.pipeline is empty; it has a time per split size");
  return sweep;
}

// Counts of choices by layer, in the order of the run.
std::vector<LayerLoad> read_expert_loads(const JsonReader& reader,
                                         const std::string& source) {
  std::vector<LayerLoad> loads;
  if (!reader.object("expert_loads")) return loads;
  for (const auto& [layer, counts] : reader.at("expert_loads").items()) {
    const std::string where = source + ": expert_loads." + layer;
    LayerLoad load{layer, {}};
    SB_CHECK(counts.is_array() && !counts.empty(), where,
             " has to be a list with a count for each expert");
    for (const Json& count : counts) {
      SB_CHECK(count.is_number() && count.get<double>() >= 0, where,
               ": a count has to be a number from 0 on");
      load.shares.push_back(count.get<double>());
    }
    const double even =
        std::accumulate(load.shares.begin(), load.shares.end(), 0.0) /
        static_cast<double>(load.shares.size());
    for (double& share : load.shares) share /= std::max(even, 1e-300);
    loads.push_back(std::move(load));
  }
  return loads;
}

// Virtual time is exact: formula and clock may differ by rounding only.
Claim check_time(const ProgramRun& run) {
  Claim claim;
  if (!run.virtual_run) {
    if (run.wall_step_s >= 0) claim.value = sim::seconds_text(run.wall_step_s);
    return claim;
  }
  const Figure& step_s = run.virtual_run->step_s;
  claim.value = sim::seconds_text(step_s.counted);
  if (step_s.predicted < 0) return claim;
  const bool equal = std::abs(step_s.predicted - step_s.counted) <=
                     1e-9 * std::abs(step_s.predicted);
  claim.verdict = equal ? Verdict::kPassed : Verdict::kFailed;
  claim.failure =
      fmt::format("a step of {} s by the clock, {} s by the closed form",
                  step_s.counted, step_s.predicted);
  return claim;
}

}  // namespace

ProgramRun read_run(const std::string& text, const std::string& source) {
  json_file::check_depth(text, source);
  Json object;
  try {
    object = Json::parse(text);
  } catch (const Json::parse_error& error) {
    SB_FAIL(source, ": no JSON: the first mistake is at byte ", error.byte);
  } catch (const Json::out_of_range&) {
    SB_FAIL(source, ": no JSON that can be read: a number is too large");
  }
  SB_CHECK(object.is_object(), source, ": a run has to be a JSON object");

  const JsonReader reader(object, source);
  ProgramRun run;
  run.chapter = reader.text("chapter");
  run.backend = reader.text("options.backend");
  run.device = reader.words({"options.device"});
  const std::int64_t world_size = reader.count("options.world_size");
  SB_CHECK(world_size >= 1 && world_size <= 10'000'000, source,
           ": options.world_size is ", world_size,
           "; it has to be from 1 to 10000000");
  run.world_size = static_cast<int>(world_size);
  SB_CHECK(reader.at("claims").is_object(), source, ": claims is missing");
  const auto first = reader.number("loss.first");
  const auto last = reader.number("loss.last");
  if (first && last) {
    run.loss = {fmt::format("{:.2f}", *first), fmt::format("{:.2f}", *last)};
  }
  run.variant =
      reader.words({"options.schedule", "options.strategy", "options.variant"});
  run.setting = readable_model(
      reader.words({"options.model", "options.dtype", "options.optimizer"}));
  // Wall time in the `sim` world is only the simulation's own.
  if (run.backend != "sim") {
    run.wall_step_s = reader.amount("wall.step_s").value_or(-1);
  }
  if (!reader.at("options.steps").is_null()) {
    run.steps = reader.count("options.steps");
  }
  run.samples = read_samples(reader);
  run.other_training = reader.words({"other_training"});
  run.ranks = read_bills(reader);
  run.virtual_run = read_virtual(reader, source);
  run.capacity_bytes = read_capacity(reader, run);
  read_numbers(reader, run);
  read_bytes(reader, run);
  read_memory(reader, run);
  run.time = check_time(run);
  run.sweep = read_sweep(reader, source);
  run.expert_loads = read_expert_loads(reader, source);
  return run;
}

}  // namespace shardbook::table
