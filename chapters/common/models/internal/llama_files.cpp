#include "chapters/common/models/internal/llama_files.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace shardbook {
namespace {

using Width = std::pair<std::string, std::int64_t>;

/// "x.a_proj.weight" and "x.b_proj.weight" side by side.
TensorInFiles joined(const std::string& name, const std::string& folder,
                     std::int64_t in, const std::vector<Width>& parts,
                     const std::string& ending) {
  TensorInFiles tensor{name + ending, {}, {}};
  std::int64_t columns = 0;
  for (const auto& [part, width] : parts) {
    tensor.pieces.push_back({folder + part + ending, ending == ".weight",
                             columns, width, /*expert=*/-1});
    columns += width;
  }
  if (ending == ".weight") tensor.shape.push_back(in);
  tensor.shape.push_back(columns);
  return tensor;
}

TensorInFiles plain(const std::string& name, Shape shape) {
  const std::int64_t columns = shape.back();
  return {name, std::move(shape), {{name, false, 0, columns, -1}}};
}

/// The matrices of all experts, one behind the other.
TensorInFiles stacked(const std::string& name, const std::string& folder,
                      std::int64_t experts, std::int64_t in,
                      const std::vector<Width>& parts) {
  TensorInFiles tensor{name, {experts, in, 0}, {}};
  for (std::int64_t e = 0; e < experts; ++e) {
    TensorInFiles one =
        joined("", folder + std::to_string(e) + ".", in, parts, ".weight");
    for (FilePiece& piece : one.pieces) {
      piece.expert = e;
      tensor.pieces.push_back(std::move(piece));
    }
    tensor.shape[2] = one.shape[1];
  }
  return tensor;
}

std::string name_of_block(std::int64_t block) {
  return "model.layers." + std::to_string(block) + ".";
}

std::vector<TensorInFiles> weights_of_block(const ModelConfig& config,
                                            std::int64_t block) {
  const LlamaConfig& llama = config.llama;
  const std::string layer = name_of_block(block);
  const std::int64_t h = config.n_embd, d = llama.head_dim,
                     q = config.n_head * d, kv = llama.kv_heads * d;
  std::vector<TensorInFiles> weights;
  const auto add = [&](const std::string& name, std::int64_t in,
                       const std::vector<Width>& parts, bool has_bias) {
    const std::string folder = layer + name.substr(0, name.find('.') + 1);
    for (const char* ending : {".weight", ".bias"}) {
      if (ending == std::string(".bias") && !has_bias) continue;
      weights.push_back(joined(layer + name, folder, in, parts, ending));
    }
  };
  add("self_attn.qkv_proj", h, {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}},
      llama.qkv_bias);
  add("self_attn.o_proj", q, {{"o_proj", h}}, llama.o_bias);
  if (llama.qk_norm) {
    weights.push_back(plain(layer + "self_attn.q_norm.weight", {d}));
    weights.push_back(plain(layer + "self_attn.k_norm.weight", {d}));
  }
  if (llama.has_experts_in(block)) {
    const bool is_mixtral = config.type == "mixtral";
    const std::string folder =
        layer + (is_mixtral ? "block_sparse_moe." : "mlp.");
    const std::int64_t experts = llama.num_experts,
                       f = llama.moe_intermediate_size;
    const char* gate = is_mixtral ? "w1" : "gate_proj";
    const char* up = is_mixtral ? "w3" : "up_proj";
    const char* down = is_mixtral ? "w2" : "down_proj";
    weights.push_back(
        joined(layer + "mlp.gate", folder, h, {{"gate", experts}}, ".weight"));
    weights.push_back(stacked(layer + "mlp.experts.gate_up_proj",
                              folder + "experts.", experts, h,
                              {{gate, f}, {up, f}}));
    weights.push_back(stacked(layer + "mlp.experts.down_proj",
                              folder + "experts.", experts, f, {{down, h}}));
  } else {
    const std::int64_t f = llama.intermediate_size;
    add("mlp.gate_up_proj", h, {{"gate_proj", f}, {"up_proj", f}},
        llama.mlp_bias);
    add("mlp.down_proj", f, {{"down_proj", h}}, llama.mlp_bias);
  }
  weights.push_back(plain(layer + "input_layernorm.weight", {h}));
  weights.push_back(plain(layer + "post_attention_layernorm.weight", {h}));
  return weights;
}

/// The weights before and behind the blocks.
std::vector<TensorInFiles> weights_around(const ModelConfig& config) {
  const std::int64_t h = config.n_embd, v = config.vocab_size;
  std::vector<TensorInFiles> weights = {
      plain("model.embed_tokens.weight", {v, h}),
      plain("model.norm.weight", {h})};
  if (!config.llama.tied) weights.push_back(plain("lm_head.weight", {v, h}));
  return weights;
}

/// An index of a dimension in the part and in the piece.
struct Place {
  std::int64_t in_part, in_piece;
};

/// The indices along `dim` that the part and the piece both have.
std::vector<Place> places(const Shards& shards, const Shape& whole,
                          std::int64_t dim, std::int64_t begin,
                          std::int64_t count) {
  std::vector<Place> found;
  std::int64_t in_part = 0;
  for (const IndexRun& run : runs_of(shards, whole, dim)) {
    for (std::int64_t i = run.begin; i < run.begin + run.count; ++i) {
      if (i >= begin && i < begin + count)
        found.push_back({in_part, i - begin});
      ++in_part;
    }
  }
  return found;
}

/// The values that a piece and a part have in common, as rows and columns.
struct Overlap {
  std::vector<Place> experts = {{0, 0}}, rows = {{0, 0}}, columns;
  /// Of one expert of the part, and of one row of it.
  std::int64_t part_expert = 0, part_row = 0;
  std::int64_t file_row = 0, file_column = 0;
};

Overlap overlap_of(const TensorInFiles& whole, const FilePiece& piece,
                   const Shards& shards, const Shape& part) {
  const std::size_t ndim = whole.shape.size();
  const auto dim = [&](std::size_t from_behind) {
    return static_cast<std::int64_t>(ndim - from_behind);
  };
  Overlap overlap;
  overlap.columns =
      places(shards, whole.shape, dim(1), piece.column, piece.columns);
  overlap.part_row = part.back();
  overlap.file_row = piece.columns;
  overlap.file_column = 1;
  if (ndim < 2) return overlap;
  const std::int64_t rows = whole.shape[ndim - 2];
  overlap.rows = places(shards, whole.shape, dim(2), 0, rows);
  overlap.part_expert = part[ndim - 2] * part.back();
  if (piece.is_transposed) {
    overlap.file_row = 1;
    overlap.file_column = rows;
  }
  if (piece.expert >= 0) {
    overlap.experts = places(shards, whole.shape, 0, piece.expert, 1);
  }
  return overlap;
}

/// Calls copy(offset in the part, offset in the file) for each value, in tiles:
/// a transposed walk over a large matrix would miss the cache at every step.
template <typename Copy>
void for_each_value(const Overlap& overlap, const Copy& copy) {
  constexpr std::size_t kTile = 32;
  const auto &rows = overlap.rows, &columns = overlap.columns;
  for (const Place& expert : overlap.experts) {
    const std::int64_t base = expert.in_part * overlap.part_expert;
    for (std::size_t r = 0; r < rows.size(); r += kTile) {
      for (std::size_t c = 0; c < columns.size(); c += kTile) {
        for (std::size_t i = r; i < std::min(r + kTile, rows.size()); ++i) {
          for (std::size_t j = c; j < std::min(c + kTile, columns.size());
               ++j) {
            copy(base + rows[i].in_part * overlap.part_row + columns[j].in_part,
                 rows[i].in_piece * overlap.file_row +
                     columns[j].in_piece * overlap.file_column);
          }
        }
      }
    }
  }
}

/// Calls visit with a value of the size of the dtype's elements.
template <typename Visit>
void by_size(DType dtype, const Visit& visit) {
  switch (dtype_bytes(dtype)) {
    case 2:
      return visit(std::uint16_t{});
    case 4:
      return visit(std::uint32_t{});
    default:
      return visit(std::uint64_t{});
  }
}

}  // namespace

Shape TensorInFiles::shape_in_file(const FilePiece& piece) const {
  if (is_plain()) return shape;
  if (!piece.is_transposed) return {piece.columns};
  return {piece.columns, shape[shape.size() - 2]};
}

std::vector<TensorInFiles> llama_weights(const ModelConfig& config) {
  std::vector<TensorInFiles> around = weights_around(config), weights;
  weights.push_back(around.front());
  for (std::int64_t block = 0; block < config.n_layer; ++block) {
    for (TensorInFiles& weight : weights_of_block(config, block)) {
      weights.push_back(std::move(weight));
    }
  }
  weights.insert(weights.end(), around.begin() + 1, around.end());
  return weights;
}

TensorInFiles llama_weight(const ModelConfig& config, const std::string& name) {
  const std::string layers = "model.layers.";
  std::vector<TensorInFiles> candidates;
  if (name.compare(0, layers.size(), layers) == 0) {
    const std::string number = name.substr(
        layers.size(), name.find('.', layers.size()) - layers.size());
    for (std::int64_t block = 0; block < config.n_layer; ++block) {
      if (std::to_string(block) != number) continue;
      candidates = weights_of_block(config, block);
    }
  } else {
    candidates = weights_around(config);
  }
  for (TensorInFiles& weight : candidates) {
    if (weight.name == name) return std::move(weight);
  }
  SB_FAIL("a ", config.type, " of this config has no weight '", name, "'");
}

void read_piece(const TensorInFiles& whole, const FilePiece& piece,
                const void* file, const Shards& shards, const Tensor& part) {
  const Overlap overlap = overlap_of(whole, piece, shards, part.shape());
  by_size(part.dtype(), [&](auto value) {
    const auto* from = static_cast<const std::byte*>(file);
    auto* to = static_cast<decltype(value)*>(part.raw());
    for_each_value(overlap, [&](std::int64_t in_part, std::int64_t in_file) {
      std::memcpy(to + in_part,
                  from + in_file * static_cast<std::int64_t>(sizeof(value)),
                  sizeof(value));
    });
  });
}

void write_piece(const TensorInFiles& whole, const FilePiece& piece,
                 const Tensor& tensor, void* file) {
  const Overlap overlap = overlap_of(whole, piece, {}, tensor.shape());
  by_size(tensor.dtype(), [&](auto value) {
    const auto* from = static_cast<const decltype(value)*>(tensor.raw());
    auto* to = static_cast<std::byte*>(file);
    for_each_value(overlap, [&](std::int64_t in_part, std::int64_t in_file) {
      std::memcpy(to + in_file * static_cast<std::int64_t>(sizeof(value)),
                  from + in_part, sizeof(value));
    });
  });
}

}  // namespace shardbook
