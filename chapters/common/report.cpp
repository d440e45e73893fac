#include "chapters/common/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "sim/timeline_json.h"
#include "sim/timeline_text.h"

namespace shardbook {
namespace {

using nlohmann::ordered_json;

// Bytes are whole numbers; sums of shares such as (P-1)/P may end in another
// last bit.
bool holds(const Claim& claim) {
  return std::abs(claim.predicted - claim.counted) <=
         1e-12 * std::abs(claim.predicted);
}

bool bytes_hold(const Report& report) {
  return std::all_of(report.ranks.begin(), report.ranks.end(),
                     [](const RankReport& rank) { return holds(rank.bytes); });
}

bool memory_holds(const Report& report) {
  for (const RankReport& rank : report.ranks) {
    for (const Claim& claim : rank.peak) {
      if (claim.predicted >= 0 && !holds(claim)) return false;
    }
  }
  return true;
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

ordered_json claim_json(const Claim& claim) {
  return {{"predicted", bytes_json(claim.predicted)},
          {"counted", bytes_json(claim.counted)}};
}

Claim claim_from(const ordered_json& object) {
  return {object["predicted"].is_null() ? -1
                                        : object["predicted"].get<double>(),
          object["counted"].get<double>()};
}

ordered_json peak_json(const RankReport& rank) {
  ordered_json peak;
  for (int k = 0; k < kNumMemoryKinds; ++k) {
    peak[memory_kind_name(static_cast<MemoryKind>(k))] =
        claim_json(rank.peak[static_cast<std::size_t>(k)]);
  }
  return peak;
}

const char* verdict(bool checked, bool passed) {
  return !checked ? "not measured" : passed ? "passed" : "failed";
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

// Times of one run differ from those of another in rounding only.
bool time_holds(const VirtualTime& time) {
  return time.predicted_step_s < 0 ||
         std::abs(time.predicted_step_s - time.step_s) <= 1e-9 * time.step_s;
}

bool time_is_checked(const VirtualTime& time) {
  return !time.cluster.empty() && time.predicted_step_s >= 0;
}

// Where the timeline goes in the text: on one line of its own, however the
// rest is indented.
constexpr const char* kTimelinePlace = "@timeline@";

ordered_json time_json(const Report& report) {
  const VirtualTime& time = report.time;
  if (time.cluster.empty()) return nullptr;
  ordered_json json = {{"cluster", time.cluster},
                       {"trust", sim::trust_name(time.trust)},
                       {"step_s", {{"predicted", nullptr},
                                   {"counted", time.step_s}}},
                       {"idle_share", time.idle_share},
                       {"exposed_comm_s", time.exposed_comm_s},
                       {"links", ordered_json::array()}};
  if (time.predicted_step_s >= 0) {
    json["step_s"]["predicted"] = time.predicted_step_s;
  }
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
  json["parity"] = {{"max_abs", report.parity.max_abs},
                    {"max_rel", report.parity.max_rel},
                    {"tolerance", report.parity.tolerance},
                    {"passed", report.parity.checked && report.parity.passed}};
  json["bytes"] = ordered_json::array();
  json["peak_memory"] = ordered_json::array();
  for (const RankReport& rank : report.ranks) {
    json["bytes"].push_back(claim_json(rank.bytes));
    json["peak_memory"].push_back(peak_json(rank));
  }
  json["claims"] = {
      {"numbers", verdict(report.parity.checked, report.parity.passed)},
      {"bytes", verdict(true, bytes_hold(report))},
      {"memory", verdict(true, memory_holds(report))},
      {"time", verdict(time_is_checked(report.time), time_holds(report.time))}};
  json["virtual"] = time_json(report);
  json["wall"] = {{"step_s", report.wall_step_s}};
  for (const auto& [key, text] : report.more) {
    json[key] = ordered_json::parse(text);
  }
  return json;
}

void print_claim(const std::string& name, const Claim& claim) {
  if (claim.predicted < 0 && claim.counted == 0) return;
  if (claim.predicted == 0 && claim.counted == 0) return;
  fmt::print("  {:<22}", name);
  if (claim.predicted < 0) {
    fmt::print("{:>14}  {:>14}\n", "", bytes_text(claim.counted));
    return;
  }
  fmt::print("{:>14}  {:>14}  {}\n", bytes_text(claim.predicted),
             bytes_text(claim.counted), holds(claim) ? "equal" : "DIFFERENT");
}

void print_text(const Options& o, const Report& report) {
  const bool images = ModelConfig::read(o.model).is_image();
  fmt::print("{}: {}, {} rank{} on {}, {} steps of {}, {} {}\n",
             report.chapter, o.model, o.world_size, o.world_size == 1 ? "" : "s",
             o.backend, o.steps,
             images ? fmt::format("{} images", o.batch)
                    : fmt::format("{} x {} tokens", o.batch, o.seq),
             o.optimizer, dtype_name(o.dtype));
  if (!report.losses.empty()) {
    fmt::print("loss     {:.4f} -> {:.4f}\n", report.losses.front(),
               report.losses.back());
  }
  if (report.parity.checked) {
    fmt::print(
        "numbers  largest difference from one device {:.3g}, relative {:.3g} "
        "(allowed {:.3g}): {}\n",
        report.parity.max_abs, report.parity.max_rel, report.parity.tolerance,
        report.parity.passed ? "equal" : "DIFFERENT");
  }
  // Ranks of one kind have one bill: they are shown together.
  std::size_t rank = 0;
  while (rank < report.ranks.size()) {
    std::size_t end = rank + 1;
    while (end < report.ranks.size() &&
           peak_json(report.ranks[end]) == peak_json(report.ranks[rank]) &&
           claim_json(report.ranks[end].bytes) ==
               claim_json(report.ranks[rank].bytes)) {
      ++end;
    }
    const std::string who =
        end - rank == 1 ? fmt::format("rank {}", rank)
                        : fmt::format("ranks {} to {}, each", rank, end - 1);
    fmt::print("{:<24}{:>14}  {:>14}\n", who, "predicted", "counted");
    print_claim("bytes sent", report.ranks[rank].bytes);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      const auto kind = static_cast<MemoryKind>(k);
      print_claim(std::string("peak ") + memory_kind_name(kind),
                  report.ranks[rank].peak[static_cast<std::size_t>(k)]);
    }
    rank = end;
  }
  const VirtualTime& time = report.time;
  if (!time.cluster.empty()) {
    fmt::print("virtual  {} per step on {} ({}), idle {:.1f} %, exposed "
               "communication {}{}\n",
               sim::seconds_text(time.step_s), time.cluster,
               sim::trust_name(time.trust), 100 * time.idle_share,
               sim::seconds_text(time.exposed_comm_s),
               !time_is_checked(time) ? ""
               : time_holds(time)
                   ? ": as predicted"
                   : fmt::format("; predicted {}: DIFFERENT",
                                 sim::seconds_text(time.predicted_step_s)));
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

double parity_tolerance(DType dtype, std::int64_t steps) {
  switch (dtype) {
    case DType::kF64:
      return 1e-10 * static_cast<double>(std::max<std::int64_t>(steps, 1));
    case DType::kF32:
      return steps <= 1 ? 1e-5 : 1e-3;
    default:
      return 5e-2;
  }
}

namespace {

/// All values but the bias of attention's keys. It adds the same to all scores
/// of a query, which softmax does not see: its gradient is zero but for
/// rounding, and Adam makes whole steps of that.
std::vector<double> values_that_train(const NamedTensor& parameter) {
  std::vector<double> values = parameter.tensor.to_vector<double>();
  const std::string& name = parameter.name;
  const std::string end = "attn.c_attn.bias";
  if (name.size() < end.size() ||
      name.compare(name.size() - end.size(), end.size(), end) != 0) {
    return values;
  }
  const auto third = static_cast<std::ptrdiff_t>(values.size() / 3);
  values.erase(values.begin() + third, values.begin() + 2 * third);
  return values;
}

}  // namespace

Parity compare_with_one_device(const Options& options,
                               const std::vector<double>& losses,
                               const std::vector<NamedTensor>& parameters,
                               const ReferenceRun& reference) {
  Parity parity;
  parity.checked = true;
  parity.tolerance = parity_tolerance(options.dtype, options.steps);
  SB_CHECK(losses.size() == reference.losses.size() &&
               parameters.size() == reference.parameters.size(),
           "compare: ", losses.size(), " losses and ", parameters.size(),
           " parameters here, ", reference.losses.size(), " and ",
           reference.parameters.size(), " on one device");
  bool finite = true;
  auto add = [&](double difference, double scale) {
    // NaN compares as false with everything: look for it.
    finite = finite && std::isfinite(difference);
    parity.max_abs = std::max(parity.max_abs, difference);
    if (scale > 0) {
      parity.max_rel = std::max(parity.max_rel, difference / scale);
    }
  };
  for (std::size_t i = 0; i < losses.size(); ++i) {
    add(std::abs(losses[i] - reference.losses[i]),
        std::abs(reference.losses[i]));
  }
  const bool is_16_bit = dtype_bytes(options.dtype) == 2;
  double all_difference = 0, all_norm = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    SB_CHECK(parameters[i].name == reference.parameters[i].name,
             "compare: parameter '", parameters[i].name, "' here, '",
             reference.parameters[i].name, "' on one device");
    const std::vector<double> mine = values_that_train(parameters[i]);
    const std::vector<double> theirs =
        values_that_train(reference.parameters[i]);
    SB_CHECK(mine.size() == theirs.size(), "compare: '", parameters[i].name,
             "' has another size than on one device");
    double largest = 0, difference = 0, norm = 0;
    for (std::size_t j = 0; j < mine.size(); ++j) {
      finite = finite && std::isfinite(mine[j]);
      const double d = mine[j] - theirs[j];
      largest = std::max(largest, std::abs(d));
      difference += d * d;
      norm += theirs[j] * theirs[j];
    }
    parity.max_abs = std::max(parity.max_abs, largest);
    all_difference += difference;
    all_norm += norm;
    if (norm > 0 && !is_16_bit) {
      parity.max_rel =
          std::max(parity.max_rel, std::sqrt(difference / norm));
    }
  }
  if (is_16_bit && all_norm > 0) {
    parity.max_rel =
        std::max(parity.max_rel, std::sqrt(all_difference / all_norm));
  }
  parity.passed = finite && parity.max_rel <= parity.tolerance;
  return parity;
}

RankReport rank_report(double predicted_bytes, double counted_bytes,
                       const MemoryBill& predicted,
                       const MemoryStats& counted) {
  RankReport rank;
  rank.bytes = {predicted_bytes, counted_bytes};
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    rank.peak[k] = {predicted.bytes[k],
                    static_cast<double>(counted.peak_by_kind[k])};
  }
  return rank;
}

std::vector<RankReport> gather_reports(ProcessGroup& world,
                                       const RankReport& mine) {
  ordered_json json = {{"bytes", claim_json(mine.bytes)},
                       {"peak", peak_json(mine)},
                       {"step_s", mine.time.step_s},
                       {"idle_share", mine.time.idle_share},
                       {"exposed_comm_s", mine.time.exposed_comm_s},
                       {"links", ordered_json::array()}};
  for (const sim::LinkBytes& link : mine.time.links) {
    json["links"].push_back({link.link, link.bytes});
  }
  std::vector<RankReport> ranks;
  for (const std::string& text : world.collect(json.dump())) {
    const ordered_json other = ordered_json::parse(text);
    RankReport rank;
    rank.bytes = claim_from(other["bytes"]);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      const auto kind = static_cast<MemoryKind>(k);
      rank.peak[static_cast<std::size_t>(k)] =
          claim_from(other["peak"][memory_kind_name(kind)]);
    }
    other["step_s"].get_to(rank.time.step_s);
    other["idle_share"].get_to(rank.time.idle_share);
    other["exposed_comm_s"].get_to(rank.time.exposed_comm_s);
    for (const auto& link : other["links"]) {
      rank.time.links.push_back({link[0], link[1]});
    }
    ranks.push_back(rank);
  }
  return ranks;
}

int print_report(const Options& options, const CommandLine& line,
                 const Report& report) {
  if (options.format == "json") {
    std::string text = to_json(options, line, report).dump(2);
    const std::string place = std::string("\"") + kTimelinePlace + "\"";
    if (const auto at = text.find(place); at != std::string::npos) {
      text.replace(at, place.size(), sim::timeline_json(report.timelines));
    }
    fmt::print("{}\n", text);
  } else {
    print_text(options, report);
  }
  std::fflush(stdout);
  const bool numbers = !report.parity.checked || report.parity.passed;
  return numbers && bytes_hold(report) && memory_holds(report) &&
                 time_holds(report.time)
             ? 0
             : kExitClaimFailed;
}

}  // namespace shardbook
