#include "chapters/11_dtensor/dtensor_layout.h"

namespace shardbook::dtensor {
namespace {

// Whether `module` ends in this name: "h.*.attn.c_attn" in "c_attn".
bool is_named(const std::string& module, const std::string& name) {
  return module == name || module.ends_with("." + name);
}

std::string module_of(const std::string& parameter) {
  return parameter.substr(0, parameter.rfind('.'));
}

// The layers of a model that have weights, tables and the last norm left out.
std::vector<BlockPart> weighted_parts(const ModelConfig& config) {
  if (config.type != "mlp") return block_table(config).parts();
  const std::int64_t h = config.n_embd, v = config.vocab_size;
  std::vector<BlockPart> parts(3);
  const auto set = [&](std::size_t i, const char* name, std::int64_t in,
                       std::int64_t out, Cut cut) {
    parts[i].name = name;
    parts[i].in = in, parts[i].out = out;
    parts[i].bias = true;
    parts[i].cut = cut;
  };
  set(0, "fc1", h, 4 * h, Cut::kColumns);
  set(1, "fc2", 4 * h, h, Cut::kRows);
  set(2, "fc3", h, v, Cut::kWhole);
  return parts;
}

}  // namespace

std::string leaf_of(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

BlockPart part_named(const std::string& module, const ModelConfig& config) {
  for (const BlockPart& part : weighted_parts(config)) {
    if (!part.name.empty() && is_named(module, part.name)) return part;
  }
  return {};
}

std::vector<ParameterKind> parameter_kinds(const ModelConfig& config) {
  const DecoderNames names = decoder_names(config);
  const auto layers = static_cast<double>(config.n_layer);
  std::vector<ParameterKind> kinds = {{leaf_of(names.table) + ".weight", 1}};
  const auto add = [&](const std::string& module, bool bias, double count) {
    kinds.push_back({module + ".weight", count});
    if (bias) kinds.push_back({module + ".bias", count});
  };
  if (config.type == "mlp") {
    for (const BlockPart& part : weighted_parts(config)) {
      add(part.name, part.bias, 1);
    }
    return kinds;
  }
  if (!names.positions.empty()) add(leaf_of(names.positions), false, 1);
  if (!names.head.empty()) add(names.head, false, 1);
  add(leaf_of(names.norm), block_table(config).norm_1.bias, 1);
  for (const BlockPart& part : weighted_parts(config)) {
    if (part.name.empty()) continue;
    add(leaf_of(names.blocks) + ".*." + part.name, part.bias, layers);
  }
  return kinds;
}

bool DTensorLayout::is_table(const std::string& name) const {
  const DecoderNames names = decoder_names(config);
  const std::string module = module_of(name);
  return is_named(module, leaf_of(names.table)) ||
         is_named(module, leaf_of(names.output()));
}

Shape DTensorLayout::whole(const std::string& name) const {
  const std::int64_t h = config.n_embd;
  if (is_table(name)) return {config.vocab_size, h};
  const std::string module = module_of(name);
  if (is_named(module, leaf_of(decoder_names(config).positions))) {
    return {config.n_positions, h};
  }
  const BlockPart part = part_named(module, config);
  if (part.name.empty()) return {h};  // the last norm
  if (part.is_norm()) return {part.out / part.heads};
  if (name.ends_with(".bias")) return {part.out};
  return {part.in, part.out};
}

Shards DTensorLayout::cuts_of_tp(const std::string& name, int rank) const {
  const int t = grid.size("tp"), index = grid.coordinate(rank, "tp");
  if (t == 1) return {};
  if (tp_cuts_vocabulary && is_table(name)) {
    return {{0, index, t, 1, config.vocab_size}};
  }
  const BlockPart part = part_named(module_of(name), config);
  const bool is_bias = name.ends_with(".bias");
  if (part.cut == Cut::kWhole) return {};
  if (part.cut == Cut::kRows) return is_bias ? Shards() : Shards{{0, index, t}};
  const std::int64_t dim = is_bias ? 0 : 1;
  if (part.columns.empty()) return {{dim, index, t}};
  return {cut_columns(dim, index, t, part.columns)};
}

Shape DTensorLayout::on_tp(const std::string& name, int rank) const {
  return shape_of(cuts_of_tp(name, rank), whole(name));
}

Shards DTensorLayout::part(const std::string& name, int rank) const {
  Shards shards = cuts_of_tp(name, rank);
  const int d = grid.size("dp");
  if (d > 1 && dp_cuts_rows) {
    shards.push_back(
        {0, grid.coordinate(rank, "dp"), d, 1, on_tp(name, rank)[0]});
  }
  return shards;
}

}  // namespace shardbook::dtensor
