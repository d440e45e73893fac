#include "chapters/table/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"

namespace shardbook::table {
namespace {

using Json = nlohmann::json;

// Looks values up by a path of keys, and names file and path when one is
// missing or of the wrong type.
class Reader {
 public:
  Reader(const Json& object, std::string source)
      : object_(object), source_(std::move(source)) {}

  // The value at "options.world_size", or null when it is not there.
  const Json& at(const std::string& path) const {
    static const Json kMissing;
    const Json* value = &object_;
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('.', begin), path.size());
      const std::string key = path.substr(begin, end - begin);
      if (!value->is_object() || !value->contains(key)) return kMissing;
      value = &(*value)[key];
      begin = end + 1;
    }
    return *value;
  }

  std::string text(const std::string& path) const {
    const Json& value = require(path);
    SB_CHECK(value.is_string(), where(path), " is ", shown(value),
             "; it has to be a string");
    return value.get<std::string>();
  }

  std::int64_t count(const std::string& path) const {
    return count_of(require(path), path);
  }

  std::optional<double> number(const std::string& path) const {
    const Json& value = at(path);
    if (value.is_null()) return std::nullopt;
    SB_CHECK(value.is_number(), where(path), " is ", shown(value),
             "; it has to be a number");
    return value.get<double>();
  }

  // The elements of an array; none when it is missing.
  std::vector<Json> list(const std::string& path) const {
    const Json& value = at(path);
    if (value.is_null()) return {};
    SB_CHECK(value.is_array(), where(path), " is ", shown(value),
             "; it has to be a list with one element per rank");
    return value.get<std::vector<Json>>();
  }

  // Members of a pair {"predicted": ..., "counted": ...} at `path`.
  std::int64_t member(const Json& pair, const char* key,
                      const std::string& path) const {
    SB_CHECK(pair.is_object() && pair.contains(key), where(path), " has no ",
             key, " number of bytes");
    const Json& value = pair[key];
    // An average over ranks may be a fraction of a byte.
    SB_CHECK(value.is_number() && value.get<double>() >= 0 &&
                 value.get<double>() < 9e18,
             where(path), ".", key, " is ", shown(value),
             "; it has to be a number of bytes from 0 up");
    return std::llround(value.get<double>());
  }

 private:
  const Json& require(const std::string& path) const {
    const Json& value = at(path);
    SB_CHECK(!value.is_null(), where(path), " is missing");
    return value;
  }

  std::int64_t count_of(const Json& value, const std::string& path) const {
    SB_CHECK(value.is_number_integer() && value >= 0, where(path), " is ",
             shown(value), "; it has to be a whole number from 0 up");
    return value.get<std::int64_t>();
  }

  std::string where(const std::string& path) const {
    return source_ + ": " + path;
  }

  static std::string shown(const Json& value) {
    const std::string text =
        value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 40 ? text : text.substr(0, 37) + "...";
  }

  const Json& object_;
  std::string source_;
};

Verdict read_verdict(const Reader& reader, const std::string& claim) {
  const Json& value = reader.at("claims." + claim);
  if (value.is_null()) return Verdict::kNotMeasured;
  const std::string text = reader.text("claims." + claim);
  if (text == "passed") return Verdict::kPassed;
  return text == "failed" ? Verdict::kFailed : Verdict::kNotMeasured;
}

std::string format_difference(double value) {
  return value == 0 ? "exact" : fmt::format("{:.1e}", value);
}

Claim read_numbers(const Reader& reader) {
  Claim claim{read_verdict(reader, "numbers"), "", ""};
  const auto relative = reader.number("parity.max_rel");
  if (relative) claim.value = format_difference(*relative);
  const auto tolerance = reader.number("parity.tolerance");
  claim.failure = fmt::format(
      "the largest relative difference to one device is {}, allowed is {}",
      relative ? format_difference(*relative) : "not a number",
      tolerance ? fmt::format("{:.1e}", *tolerance) : "not stated");
  return claim;
}

// Adds "rank 1: 96 B counted, 64 B predicted" where the two differ.
void add_difference(std::string& failure, const std::string& what,
                    std::int64_t predicted, std::int64_t counted) {
  if (predicted == counted) return;
  failure += fmt::format("{}{}: {} B counted, {} B predicted",
                         failure.empty() ? "" : "; ", what, counted, predicted);
}

Claim read_bytes(const Reader& reader) {
  Claim claim{read_verdict(reader, "bytes"), "", ""};
  std::int64_t most = -1;
  int rank = 0;
  for (const Json& pair : reader.list("bytes")) {
    const std::string path = fmt::format("bytes[{}]", rank);
    const auto counted = reader.member(pair, "counted", path);
    const auto predicted = reader.member(pair, "predicted", path);
    add_difference(claim.failure, fmt::format("rank {}", rank++), predicted,
                   counted);
    most = std::max(most, counted);
  }
  if (most >= 0) claim.value = format_bytes(most);
  return claim;
}

// The peak of a rank is its "total" where it states one; else the kinds' sum.
Claim read_memory(const Reader& reader) {
  Claim claim{read_verdict(reader, "memory"), "", ""};
  std::int64_t most = -1;
  int rank = 0;
  for (const Json& kinds : reader.list("peak_memory")) {
    std::int64_t sum = 0;
    std::int64_t total = -1;
    for (const auto& [kind, pair] : kinds.items()) {
      const std::string path = fmt::format("peak_memory[{}].{}", rank, kind);
      const auto counted = reader.member(pair, "counted", path);
      const bool predicted =
          pair.contains("predicted") && !pair["predicted"].is_null();
      if (predicted) {
        add_difference(claim.failure, fmt::format("rank {} {}", rank, kind),
                       reader.member(pair, "predicted", path), counted);
      }
      if (kind == "total") {
        total = counted;
      } else {
        sum += counted;
      }
    }
    most = std::max(most, total >= 0 ? total : sum);
    ++rank;
  }
  if (most >= 0) claim.value = format_bytes(most);
  return claim;
}

Claim read_time(const Reader& reader) {
  Claim claim{read_verdict(reader, "time"), "", ""};
  const auto step = reader.number("wall.step_s");
  if (step) claim.value = format_seconds(*step);
  claim.failure = "the predicted step time is out of its tolerance";
  return claim;
}

}  // namespace

ProgramRun read_run(const std::string& text, const std::string& source) {
  Json object;
  try {
    object = Json::parse(text);
  } catch (const Json::parse_error& error) {
    SB_FAIL(source, ": no JSON: the first mistake is at byte ", error.byte);
  }
  SB_CHECK(object.is_object(), source, ": a run has to be a JSON object");

  const Reader reader(object, source);
  ProgramRun run;
  run.chapter = reader.text("chapter");
  run.backend = reader.text("options.backend");
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
  run.numbers = read_numbers(reader);
  run.bytes = read_bytes(reader);
  run.memory = read_memory(reader);
  run.time = read_time(reader);
  return run;
}

}  // namespace shardbook::table
