// What --resume compares of a config.

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "chapters/15_engine/strategies.h"

namespace shardbook::engine {
namespace {

using json_file::Json;

std::string as_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  // As the command line writes it: 1, not 1.0
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  return value.dump();
}

/// The options of chapters 13 and 14 that say the same.
std::vector<ComparedOption> as_options(const DeepSpeedConfig& config,
                                       DType dtype) {
  std::vector<ComparedOption> all;
  const auto add = [&](const char* option, const auto& value,
                       const auto& otherwise) {
    all.push_back({option, as_text(value), as_text(otherwise)});
  };
  const BookConfig& book = config.book;
  if (book.has_experts()) {
    const moe::MoeOptions &moe = book.moe, none;
    const moe::GateOptions &gate = moe.gate, usual;
    add("--num-experts", fmt::format("{}", fmt::join(moe.num_experts, ",")),
        "1");
    add("--top-k", gate.k, usual.k);
    add("--capacity-factor", gate.capacity_factor, usual.capacity_factor);
    add("--min-capacity", gate.min_capacity, usual.min_capacity);
    add("--noise", internal::lower_case(book.noisy_gate_policy), "none");
    add("--drop-tokens", gate.drop_tokens, usual.drop_tokens);
    add("--use-rts", gate.use_rts, usual.use_rts);
    add("--aux-coefficient", moe.aux_coefficient, none.aux_coefficient);
    add("--residual", moe.use_residual, none.use_residual);
  }
  if (config.fp16.enabled) {
    const LossScaleOptions scale = config.loss_scale(), none;
    add("--loss-scale", scale.scale, none.scale);
    add("--loss-scale-window", scale.window, none.window);
    add("--hysteresis", scale.hysteresis, none.hysteresis);
    if (config.fp16.is_dynamic()) {
      add("--scaler",
          scale.kind == ScalerKind::kDeepSpeed0171 ? "deepspeed-0.17.1"
                                                   : "deepspeed without ZeRO",
          "deepspeed");
    }
  }
  add("--accumulate-f32",
      dtype_bytes(dtype) == 2 && config.grad_accum_dtype == "fp32", false);
  return all;
}

/// The values of all keys, by path.
void collect_leaves(const Json& json, const std::string& path,
                    std::map<std::string, std::string>& values) {
  for (const auto& [key, value] : json.items()) {
    if (value.is_object()) {
      collect_leaves(value, path + "/" + key, values);
    } else {
      values[path + "/" + key] = as_text(value);
    }
  }
}

}  // namespace

std::map<std::string, std::string> internal::leaf_values(
    const DeepSpeedConfig& config) {
  std::map<std::string, std::string> values;
  collect_leaves(Json::parse(config.to_json()), "", values);
  return values;
}

std::vector<ComparedOption> compared_keys(const DeepSpeedConfig& config,
                                          DType dtype) {
  std::vector<ComparedOption> all = as_options(config, dtype);
  const auto usual = internal::leaf_values(DeepSpeedConfig());
  for (const auto& [path, value] : internal::leaf_values(config)) {
    const std::size_t slash = path.rfind('/');
    const internal::KnownKeys* row =
        internal::row_of(path.substr(0, slash), path.substr(slash + 1));
    if (row != nullptr && row->why[0] != '\0') continue;
    // Without a scaled loss, its scale does not matter
    if (path.rfind("/fp16/", 0) == 0 && !config.fp16.enabled) continue;
    // Gradients travel in their own dtype anyway
    const bool is_wire =
        path.find("communication_data_type") != std::string::npos;
    if (is_wire && dtype_of(value) == dtype) continue;
    const auto otherwise = usual.find(path);
    all.push_back(
        {path, value, otherwise == usual.end() ? "" : otherwise->second});
  }
  return all;
}

}  // namespace shardbook::engine
