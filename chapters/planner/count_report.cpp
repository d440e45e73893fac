// What a model's sizes alone tell: parameters, operations, and memory
// without a plan.

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/report.h"
#include "chapters/pictures/text_table.h"
#include "chapters/planner/plan_report.h"
#include "core/how_many.h"

namespace shardbook::planner {
namespace {

using Json = nlohmann::ordered_json;
using pictures::text_table::align;
using pictures::text_table::wrap;

constexpr double kBF16Bytes = 2;  // of keys and values

/// Operations per token of forward and backward.
struct Operations {
  const char *key, *who;
  double forward, backward;

  double sum() const { return forward + backward; }
};

std::vector<Operations> operations_of(const CountRequest& request) {
  const CountedModel& model = request.model;
  const auto seq = static_cast<double>(request.seq);
  const auto counted = [&](const char* key, const char* who, Mask mask) {
    return Operations{key, who, model.operations(seq, mask),
                      model.backward_operations(seq, mask)};
  };
  return {
      counted("masked", "without pairs that the mask hides", Mask::kCounted),
      counted("pytorch", "PyTorch's FlopCounterMode", Mask::kIgnored),
      {"palm", "PaLM, appendix B: 6N + 12LHQT", 0, model.palm_operations(seq)},
      {"torchtitan", "torchtitan", 0, model.torchtitan_operations(seq)}};
}

struct Memory {
  zero::ModelStates states;
  std::optional<double> activations;
};

Memory memory_of(const CountRequest& request) {
  const CountedModel& model = request.model;
  Memory memory;
  memory.states =
      zero::model_states(/*stage=*/0, model.parameters(), /*ranks=*/1,
                         zero::state_bytes(request.dtype, "adamw", {}));
  if (!model.trained) return memory;
  KeptSizes sizes;
  sizes.rows = 1;
  sizes.tokens = static_cast<double>(request.seq);
  sizes.element = static_cast<double>(dtype_bytes(request.dtype));
  const double kept = kept_by_model(*model.trained, sizes);
  if (kept != kNoClaim) memory.activations = kept;
  return memory;
}

/// "8.03 billion"
std::string count_of(double count, int digits = 2,
                     const char* trillion = "trillion",
                     const char* billion = "billion",
                     const char* million = "million") {
  const auto [size, name] = count >= 1e12  ? std::pair(1e12, trillion)
                            : count >= 1e9 ? std::pair(1e9, billion)
                                           : std::pair(1e6, million);
  return fmt::format("{:.{}f} {}", count / size, digits, name);
}

std::string operations_text(double operations) {
  if (operations == 0) return "-";
  return count_of(operations, 3, "TFLOP", "GFLOP", "MFLOP");
}

/// Bytes of little things, too.
std::string small_bytes(double bytes) {
  return bytes >= 1e6 ? bytes_text(bytes)
                      : fmt::format("{:.1f} kB", bytes / 1e3);
}

/// An integer where a double is one.
Json number(double value) {
  constexpr double kExact = 9007199254740992;  // 2^53
  if (value == std::floor(value) && value < kExact) {
    return static_cast<std::int64_t>(value);
  }
  return value;
}

constexpr const char* kGroups[] = {
    "embedding",      "attention", "mlp",  "experts",
    "shared_experts", "router",    "norm", "head"};

std::string parts_text(const CountedModel& model) {
  const double all = model.parameters();
  std::vector<pictures::text_table::Row> rows = {
      {"part", "parameters", "share"}};
  const std::map<std::string, double> parts = model.parts();
  for (const char* group : kGroups) {
    const auto part = parts.find(group);
    if (part == parts.end()) continue;
    std::string name = group;
    if (name == "shared_experts") name = "shared experts";
    rows.push_back({name, with_commas(part->second),
                    fmt::format("{:.1f} %", 100 * part->second / all)});
  }
  rows.push_back({"all", with_commas(all), "100.0 %"});
  return align(rows);
}

std::string kv_text(const CountRequest& request) {
  const CountedModel& model = request.model;
  const auto seq = static_cast<double>(request.seq);
  const auto text = [&](bool latent) {
    return fmt::format("{} for each token, {} for {}",
                       small_bytes(model.kv_bytes(1, kBF16Bytes, latent)),
                       small_bytes(model.kv_bytes(seq, kBF16Bytes, latent)),
                       how_many(request.seq, "token"));
  };
  std::string all = "Keys and values of a sample in bf16: " + text(false);
  if (model.has_latent()) {
    all += "; as latents, from which they can be computed again: " + text(true);
  }
  return all;
}

std::string memory_text(const CountRequest& request) {
  const Memory memory = memory_of(request);
  const zero::ModelStates& states = memory.states;
  const std::string head = fmt::format(
      "One device that trains in {} with AdamW: parameters {}, gradients {}, "
      "optimizer {}",
      dtype_name(request.dtype), bytes_text(states.parameters),
      bytes_text(states.gradients), bytes_text(states.optimizer));
  if (!memory.activations) {
    return head + ": " + bytes_text(states.total()) +
           ". Activations are not known: the book " +
           (request.model.trained ? "predicts none of experts without capacity"
                                  : "does not train this model");
  }
  return head +
         fmt::format(
             ", activations {} (one sample of {}, nothing recomputed): {}",
             bytes_text(*memory.activations), how_many(request.seq, "token"),
             bytes_text(states.total() + *memory.activations));
}

}  // namespace

std::string count_text(const CountRequest& request) {
  const CountedModel& model = request.model;
  std::string text =
      wrap(fmt::format("{}, a {}: {} parameters", request.name, model.type,
                       count_of(model.parameters()))) +
      "\n" + parts_text(model) + "\n" +
      wrap(fmt::format("Of these, {} act on a token; {} without the tables and "
                       "the output layer.",
                       count_of(model.active()),
                       count_of(model.active_in_blocks()))) +
      "\n" +
      wrap(fmt::format("Operations per token, in samples of {}:",
                       how_many(request.seq, "token")));
  std::vector<pictures::text_table::Row> rows = {
      {"counted by", "forward", "backward", "both"}};
  for (const Operations& each : operations_of(request)) {
    rows.push_back({each.who, operations_text(each.forward),
                    operations_text(each.forward > 0 ? each.backward : 0),
                    operations_text(each.sum())});
  }
  text += align(rows) + "\n" + wrap(kv_text(request) + ".") +
          wrap(memory_text(request) + ".");
  return text + notes_text(model.remarks);
}

std::string count_json(const CountRequest& request) {
  const CountedModel& model = request.model;
  const auto seq = static_cast<double>(request.seq);
  Json parts = Json::object(), operations = Json::object();
  const std::map<std::string, double> all = model.parts();
  for (const char* group : kGroups) {
    const auto part = all.find(group);
    if (part != all.end()) parts[group] = number(part->second);
  }
  for (const Operations& each : operations_of(request)) {
    Json one = {{"both", number(each.sum())}};
    if (each.forward > 0) {
      one["forward"] = number(each.forward);
      one["backward"] = number(each.backward);
    }
    operations[each.key] = one;
  }
  Json kv = {{"per_token", number(model.kv_bytes(1, kBF16Bytes, false))},
             {"per_sequence", number(model.kv_bytes(seq, kBF16Bytes, false))}};
  if (model.has_latent()) {
    kv["latent_per_token"] = number(model.kv_bytes(1, kBF16Bytes, true));
    kv["latent_per_sequence"] = number(model.kv_bytes(seq, kBF16Bytes, true));
  }
  const Memory memory = memory_of(request);
  const Json json = {
      {"model", request.name},
      {"model_type", model.type},
      {"is_trained", model.trained.has_value()},
      {"parameters", number(model.parameters())},
      {"parameters_active", number(model.active())},
      {"parameters_active_in_blocks", number(model.active_in_blocks())},
      {"parts", parts},
      {"seq", request.seq},
      {"flops_per_token", operations},
      {"kv_bytes", kv},
      {"memory_bytes",
       {{"dtype", dtype_name(request.dtype)},
        {"parameters", number(memory.states.parameters)},
        {"gradients", number(memory.states.gradients)},
        {"optimizer", number(memory.states.optimizer)},
        {"activations",
         memory.activations ? number(*memory.activations) : Json()}}},
      {"remarks", model.remarks}};
  return json.dump(2) + "\n";
}

}  // namespace shardbook::planner
