#include "chapters/common/run/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "chapters/common/run/exit_status.h"
#include "core/how_many.h"
#include "core/text_file.h"
#include "sim/timeline_json.h"
#include "sim/timeline_text.h"

namespace shardbook {
namespace {

using nlohmann::ordered_json;

// Bytes are whole numbers; sums of shares such as (P-1)/P may differ in the
// last bit.
bool holds(const Claim& claim) {
  return std::abs(claim.predicted - claim.counted) <=
         1e-12 * std::abs(claim.predicted);
}

std::string bytes_text(double bytes) {
  if (bytes < 1024) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1024 * 1024) return fmt::format("{:.1f} KiB", bytes / 1024);
  if (bytes < 1024.0 * 1024 * 1024) {
    return fmt::format("{:.2f} MiB", bytes / (1024 * 1024));
  }
  return fmt::format("{:.2f} GiB", bytes / (1024.0 * 1024 * 1024));
}

ordered_json bytes_json(double bytes) {
  if (bytes < 0) return nullptr;
  if (bytes == std::floor(bytes)) return static_cast<std::int64_t>(bytes);
  return bytes;
}

ordered_json or_null(const ordered_json& value, bool is_known) {
  return is_known ? value : nullptr;
}

ordered_json claim_json(const Claim& claim) {
  return {{"predicted", bytes_json(claim.predicted)},
          {"counted", bytes_json(claim.counted)}};
}

ordered_json held_json(const RankReport& rank) {
  ordered_json held;
  for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
    held[memory_kind_name(static_cast<MemoryKind>(k))] =
        claim_json(rank.held[k]);
  }
  return held;
}

ordered_json peak_json(const RankReport& rank) {
  const auto json = [](const Peak& peak) {
    return ordered_json{{"simulated", bytes_json(peak.simulated)},
                        {"counted", bytes_json(peak.counted)}};
  };
  ordered_json peak;
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    peak[memory_kind_name(static_cast<MemoryKind>(k))] = json(rank.peak[k]);
  }
  peak["total"] = json(rank.peak_total);
  return peak;
}

/// The virtual time of a step: by this run's clock, or (on GPUs, which have
/// none) by the run on shapes.
double virtual_step_s(const VirtualTime& time) {
  return time.step_s > 0 ? time.step_s : time.simulated_step_s;
}

/// The report's claims, and what became of them.
std::vector<std::pair<const char*, const char*>> verdicts_of(
    const Report& report) {
  std::vector<Claim> bytes, claims;
  for (const RankReport& rank : report.ranks) {
    bytes.push_back(rank.bytes);
    claims.insert(claims.end(), rank.held.begin(), rank.held.end());
  }
  const Parity& parity = report.parity;
  const char* equality = parity.passed ? "passed" : "failed";
  return {{"numbers", parity.checked ? equality : "not measured"},
          {"bytes", verdict_of(bytes)},
          {"memory", verdict_of(claims)},
          {"time", time_verdict(report.time)}};
}

ordered_json options_json(const Options& o, const CommandLine& line) {
  ordered_json options = {{"world_size", o.world_size},
                          {"backend", o.backend},
                          {"device", o.device},
                          {"model", o.model},
                          {"dtype", dtype_name(o.dtype)},
                          {"data", o.data},
                          {"steps", o.steps},
                          {"batch", o.batch},
                          {"seq", o.seq},
                          {"seed", o.seed},
                          {"optimizer", o.optimizer},
                          {"lr", o.optimizer_options.lr}};
  for (const auto& [flag, value] : line.given()) {
    std::string key = flag.substr(2);
    std::replace(key.begin(), key.end(), '-', '_');
    if (!options.contains(key)) options[key] = value;
  }
  return options;
}

// Stands for the timeline in the text: a line of its own, however the rest is
// indented.
constexpr const char* kTimelinePlace = "@timeline@";

ordered_json time_json(const Report& report) {
  const VirtualTime& time = report.time;
  if (time.cluster.empty()) return nullptr;
  const bool has_form = time.closed_form_s >= 0 && virtual_step_s(time) > 0;
  ordered_json json = {{"cluster", time.cluster},
                       {"trust", sim::trust_name(time.trust)},
                       {"step_s",
                        {{"closed_form", or_null(time.closed_form_s, has_form)},
                         {"simulated", or_null(time.simulated_step_s,
                                               time.simulated_step_s > 0)},
                         {"counted", or_null(time.step_s, time.step_s > 0)}}},
                       {"idle_share", time.idle_share},
                       {"exposed_comm_s", time.exposed_comm_s},
                       {"bubble_s", time.bubble_s},
                       {"links", ordered_json::array()}};
  for (const sim::LinkBytes& link : time.links) {
    json["links"].push_back({{"link", link.link}, {"bytes", link.bytes}});
  }
  if (!report.timelines.empty()) json["timeline"] = kTimelinePlace;
  return json;
}

ordered_json to_json(const Options& options, const CommandLine& line,
                     const Report& report) {
  ordered_json json;
  json["chapter"] = report.chapter;
  json["options"] = options_json(options, line);
  if (!report.losses.empty()) {
    json["loss"] = {{"first", report.losses.front()},
                    {"last", report.losses.back()}};
  }
  const Parity& parity = report.parity;
  json["parity"] = {
      {"max_abs", parity.max_abs},
      {"max_rel", parity.max_rel},
      {"tolerance", parity.tolerance},
      {"last_bit", or_null(parity.last_bit, parity.last_bit >= 0)},
      {"one_device_finite", parity.one_device_finite},
      {"passed", parity.checked && parity.passed}};
  if (!report.not_finite.empty()) json["not_finite"] = report.not_finite;
  for (const char* key : {"devices", "bytes", "held_memory", "peak_memory"}) {
    json[key] = ordered_json::array();
  }
  for (const RankReport& rank : report.ranks) {
    json["devices"].push_back(rank.device);
    json["bytes"].push_back(claim_json(rank.bytes));
    json["held_memory"].push_back(held_json(rank));
    json["peak_memory"].push_back(peak_json(rank));
  }
  const Fit fit = fit_of(options, report);
  const bool is_limited = fit.capacity_bytes > 0;
  json["fits"] = or_null(fit.fits(), is_limited);
  json["capacity_bytes"] = or_null(bytes_json(fit.capacity_bytes), is_limited);
  for (const auto& [claim, verdict] : verdicts_of(report)) {
    json["claims"][claim] = verdict;
  }
  json["virtual"] = time_json(report);
  json["wall"] = {{"step_s", report.wall_step_s}};
  for (const auto& [key, text] : report.more) {
    json[key] = ordered_json::parse(text);
  }
  return json;
}

std::string json_text(const Options& options, const CommandLine& line,
                      const Report& report) {
  std::string text = to_json(options, line, report).dump(2);
  const std::string place = std::string("\"") + kTimelinePlace + "\"";
  if (const auto at = text.find(place); at != std::string::npos) {
    text.replace(at, place.size(), sim::timeline_json(report.timelines));
  }
  return text + "\n";
}

void print_claim(const char* name, const Claim& claim) {
  if (claim.predicted <= 0 && claim.counted == 0) return;
  fmt::print("  {:<22}", name);
  if (claim.predicted < 0) {
    fmt::print("{:>14}  {:>14}\n",
               claim.predicted == kNoClaim ? "" : "not predicted",
               bytes_text(claim.counted));
    return;
  }
  fmt::print("{:>14}  {:>14}  {}\n", bytes_text(claim.predicted),
             bytes_text(claim.counted), holds(claim) ? "equal" : "DIFFERENT");
}

void print_rank(const std::string& who, const RankReport& rank,
                bool on_shapes) {
  fmt::print("{:<24}{:>14}  {:>14}\n", who, "predicted", "counted");
  print_claim("bytes sent", rank.bytes);
  for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
    print_claim(held_name(static_cast<MemoryKind>(k)), rank.held[k]);
  }
  // Not a claim: it comes from the program itself
  fmt::print("  {:<22}{:>14}  {:>14}\n", "peak, simulated",
             on_shapes || rank.peak_total.simulated < 0
                 ? ""
                 : bytes_text(rank.peak_total.simulated),
             bytes_text(rank.peak_total.counted));
}

/// Whether two ranks have one bill, and are shown together. Peaks counted on
/// threads may differ by when a message's buffer was freed; simulated ones do not.
bool are_alike(const RankReport& a, const RankReport& b, bool on_shapes) {
  const bool is_simulated = !on_shapes && a.peak_total.simulated >= 0;
  return a.held == b.held && a.bytes == b.bytes &&
         (is_simulated ? a.peak_total.simulated == b.peak_total.simulated
                       : a.peak == b.peak && a.peak_total == b.peak_total);
}

/// The claim on time, where virtual time is kept.
void print_closed_form(const VirtualTime& time) {
  if (time.closed_form_s < 0) {
    fmt::print("formula  no closed form here{}\n",
               time.closed_form_command.empty()
                   ? ""
                   : "; one run that has one: " + time.closed_form_command);
    return;
  }
  fmt::print(
      "formula  {} per step by the page's closed form: {}\n",
      sim::seconds_text(time.closed_form_s),
      std::string_view(time_verdict(time)) == "passed" ? "equal" : "DIFFERENT");
}

/// "324", "80.4".
std::string gigabytes_text(double bytes) {
  const double tenths = std::round(bytes / 1e8);
  return fmt::format("{}", tenths / 10);
}

/// A program without --model has a net of its own, for images.
bool reads_images(const Options& o, const CommandLine& line) {
  const auto values = line.values();
  const bool has_model =
      std::any_of(values.begin(), values.end(),
                  [](const auto& each) { return each.first == "--model"; });
  return !has_model || ModelConfig::read(o.model).is_image();
}

void print_text(const Options& o, const Report& report, bool images) {
  fmt::print("{}: {}, {} on {}{}, {} of {}, {} {}\n", report.chapter, o.model,
             how_many(o.world_size, "rank"), o.backend,
             o.device == "cpu" ? "" : " and " + o.device,
             how_many(o.steps, "step"),
             images ? how_many(o.batch, "image")
                    : fmt::format("{} x {} tokens", o.batch, o.seq),
             o.optimizer, dtype_name(o.dtype));
  if (!report.tokens.empty()) fmt::print("data     {}\n", report.tokens);
  if (!report.losses.empty()) {
    fmt::print("loss     {:.4f} -> {:.4f}\n", report.losses.front(),
               report.losses.back());
  }
  if (!report.not_finite.empty()) {
    const bool alone = report.parity.checked && report.parity.one_device_finite;
    fmt::print("numbers  {}{}\n", report.not_finite,
               alone ? "; one device's numbers are finite: DIFFERENT"
                     : ": nothing to compare");
  } else if (report.parity.checked) {
    fmt::print(
        "numbers  largest difference from one device {:.3g}, relative {:.3g} "
        "(allowed {:.3g}): {}\n",
        report.parity.max_abs, report.parity.max_rel, report.parity.tolerance,
        report.parity.passed ? "equal" : "DIFFERENT");
    if (report.parity.last_bit >= 0) {
      fmt::print(
          "         one device whose weights differ in their last bit: "
          "{:.3g}\n",
          report.parity.last_bit);
    }
  }
  const bool on_shapes = o.backend == "sim";
  std::size_t rank = 0;
  while (rank < report.ranks.size()) {
    RankReport shown = report.ranks[rank];
    std::size_t end = rank + 1;
    for (; end < report.ranks.size() &&
           are_alike(report.ranks[end], report.ranks[rank], on_shapes);
         ++end) {
      shown.peak_total.counted = std::max(shown.peak_total.counted,
                                          report.ranks[end].peak_total.counted);
    }
    const std::string who =
        end - rank == 1 ? fmt::format("rank {}", rank)
                        : fmt::format("ranks {} to {}, each", rank, end - 1);
    print_rank(who, shown, on_shapes);
    rank = end;
  }
  const VirtualTime& time = report.time;
  if (!time.cluster.empty() && virtual_step_s(time) > 0) {
    // GPUs have no clock that measures idle time
    fmt::print("virtual  {} per step on {} ({}), {}simulated\n",
               sim::seconds_text(virtual_step_s(time)), time.cluster,
               sim::trust_name(time.trust),
               time.step_s == 0
                   ? ""
                   : fmt::format("idle {:.1f} %, exposed communication {}, ",
                                 100 * time.idle_share,
                                 sim::seconds_text(time.exposed_comm_s)));
    print_closed_form(time);
    const Fit fit = fit_of(o, report);
    if (!fit.fits()) {
      fmt::print("memory   does not fit: {} of {} GB\n",
                 gigabytes_text(fit.needed_bytes),
                 gigabytes_text(fit.capacity_bytes));
    }
  }
  if (o.backend == "sim") return;
  fmt::print("time     {:.2f} ms per step, {:.0f} {}/s\n",
             report.wall_step_s * 1e3,
             report.wall_step_s > 0
                 ? static_cast<double>(o.batch * o.seq) / report.wall_step_s
                 : 0.0,
             images ? "images" : "tokens");
}

}  // namespace

const char* verdict_of(const std::vector<Claim>& claims) {
  bool all_predicted = true;
  for (const Claim& claim : claims) {
    if (claim.predicted >= 0 && !holds(claim)) return "failed";
    if (claim.predicted == kNotPredicted && claim.counted > 0) {
      all_predicted = false;
    }
  }
  return all_predicted ? "passed" : "not predicted";
}

const char* time_verdict(const VirtualTime& time) {
  const double step_s = virtual_step_s(time);
  if (time.cluster.empty() || step_s <= 0) return "not measured";
  if (time.closed_form_s < 0) return "no closed form";
  // The formula and the clock add up in different orders.
  return std::abs(time.closed_form_s - step_s) <= 1e-9 * step_s ? "passed"
                                                                : "failed";
}

const char* held_name(MemoryKind kind) {
  constexpr std::array<const char*, kNumHeldKinds> kNames = {
      "parameters", "gradients", "optimizer state", "activations kept"};
  return kNames.at(static_cast<std::size_t>(kind));
}

Fit fit_of(const Options& options, const Report& report) {
  Fit fit;
  for (const RankReport& rank : report.ranks) {
    fit.needed_bytes = std::max(fit.needed_bytes, rank.peak_total.counted);
  }
  fit.capacity_bytes = options.device_memory_bytes > 0
                           ? static_cast<double>(options.device_memory_bytes)
                           : report.time.capacity_bytes;
  return fit;
}

int print_report(const Options& options, const CommandLine& line,
                 const Report& report) {
  if (!options.report.empty()) {
    write_text_file(options.report, json_text(options, line, report),
                    "--report " + options.report + ": this file");
  }
  if (options.format == "json") {
    fmt::print("{}", json_text(options, line, report));
  } else {
    std::fputs(report.remarks.c_str(), stdout);
    print_text(options, report, reads_images(options, line));
    std::fputs(report.appendix.c_str(), stdout);
  }
  std::fflush(stdout);
  for (const auto& [claim, verdict] : verdicts_of(report)) {
    if (std::string_view(verdict) == "failed") return kExitClaimFailed;
  }
  return 0;
}

}  // namespace shardbook
