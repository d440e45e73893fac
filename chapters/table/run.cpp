#include "chapters/table/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "chapters/table/internal/json_reader.h"
#include "core/check.h"
#include "core/how_many.h"
#include "sim/cluster.h"
#include "sim/timeline_json.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using internal::Json;
using internal::JsonReader;

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
  std::string sizes;
  for (const auto& [key, value] : config.items()) {
    if (key == "model_type") continue;
    sizes += (sizes.empty() ? "" : ", ") + key + " " + value.dump();
  }
  return config.value("model_type", "gpt2") + " (" + sizes + ")" +
         setting.substr(end + 1);
}

Verdict read_verdict(const JsonReader& reader, const std::string& claim) {
  const Json& value = reader.at("claims." + claim);
  if (value.is_null()) return Verdict::kNotMeasured;
  const std::string text = reader.text("claims." + claim);
  if (text == "passed") return Verdict::kPassed;
  return text == "failed" ? Verdict::kFailed : Verdict::kNotMeasured;
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
  const auto tolerance = reader.number("parity.tolerance");
  claim.failure = fmt::format(
      "the largest relative difference to one device is {}, allowed is {}",
      relative ? format_difference(*relative) : "not a number",
      tolerance ? fmt::format("{:.1e}", *tolerance) : "not stated");
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
  const std::vector<Json> bytes = reader.list("bytes");
  std::vector<RankBill> bills(
      std::max({bytes.size(), reader.list("held_memory").size(),
                reader.list("peak_memory").size()}));
  for (std::size_t r = 0; r < bytes.size(); ++r) {
    bills[r].sent = read_figure(reader, bytes[r], fmt::format("bytes[{}]", r),
                                "predicted", true);
  }
  const auto read_kinds = [&](const char* list, auto RankBill::*kinds,
                              const char* key) {
    const std::vector<Json> ranks = reader.list(list);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      for (const auto& [kind, pair] : ranks[r].items()) {
        const std::string path = fmt::format("{}[{}].{}", list, r, kind);
        (bills[r].*kinds)
            .emplace_back(kind, read_figure(reader, pair, path, key, false));
      }
    }
  };
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
  if (const auto tolerance = reader.number("parity.tolerance")) {
    run.tolerance = fmt::format("{:.1e}", *tolerance);
  }
  read_bytes(reader, run);
  read_memory(reader, run);
  run.time = check_time(run);
  run.sweep = read_sweep(reader, source);
  run.expert_loads = read_expert_loads(reader, source);
  return run;
}

std::string format_difference(double value) {
  return value == 0 ? "exact" : fmt::format("{:.1e}", value);
}

bool fits(const ProgramRun& run) {
  return run.capacity_bytes == 0 || run.peak_bytes <= run.capacity_bytes;
}

double step_of(const ProgramRun& run) {
  return run.virtual_run ? run.virtual_run->step_s.counted : run.wall_step_s;
}

double sent_per_step(const ProgramRun& run) {
  if (run.sent_bytes < 0 || run.steps == 0) return run.sent_bytes;
  return run.sent_bytes / static_cast<double>(run.steps);
}

std::string run_name(const ProgramRun& run) {
  const std::string mark = run.other_training.empty() ? "" : "*";
  if (!run.label.empty()) return run.label + mark;
  return run.chapter + (run.variant.empty() ? "" : " " + run.variant) + mark;
}

}  // namespace shardbook::table
