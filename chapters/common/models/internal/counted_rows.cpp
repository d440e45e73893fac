#include <algorithm>
#include <utility>

#include "chapters/common/models/internal/counted_json.h"

namespace shardbook {
namespace {

std::vector<BlockPart> latent_of(const CountedSizes& file) {
  return latent_parts({file["hidden"], file["heads"], file["q_rank"],
                       file["kv_rank"], file["rope"], file["nope"],
                       file["value"], file["bias"] != 0});
}

/// The rows of a model.
class Rows {
 public:
  explicit Rows(const CountedSizes& file) : file_(file) {}

  std::vector<CountedPart> take() { return std::move(rows_); }

  /// How many of the parts that follow there are.
  double times = 1;

  CountedPart& add(const std::string& group, const BlockPart& part) {
    rows_.push_back({group, part, times});
    return rows_.back();
  }
  /// `bias` is the number that says whether there is one; empty: there is none.
  CountedPart& product(const std::string& group, std::int64_t in,
                       std::int64_t out, const std::string& bias = "") {
    BlockPart part;
    part.in = in;
    part.out = out;
    part.bias = !bias.empty() && file_[bias] != 0;
    return add(group, part);
  }
  void table(std::int64_t rows, std::int64_t width) {
    BlockPart part;
    part.kind = PartKind::kTable;
    part.in = rows;
    part.out = width;
    add("embedding", part);
  }
  void norm(const std::string& group, std::int64_t width, bool has_bias) {
    BlockPart part;
    part.kind = has_bias ? PartKind::kLayerNorm : PartKind::kRmsNorm;
    part.in = part.out = width;
    part.bias = has_bias;
    add(group, part);
  }
  /// Of a block, or behind them.
  void norms(std::int64_t number) {
    if (file_["norm"] == 0) return;
    for (; number > 0; --number) {
      norm("norm", file_["hidden"], file_["norm_bias"] != 0);
    }
  }
  void mlp(const std::string& group, std::int64_t width,
           const std::string& bias, std::int64_t experts = 1,
           std::int64_t chosen = 1) {
    const std::int64_t h = file_["hidden"];
    const std::int64_t wide = file_["gated"] != 0 ? 2 * width : width;
    product(group, h, wide, bias);
    product(group, width, h, bias);
    for (auto row = rows_.end() - 2; row != rows_.end(); ++row) {
      row->part.experts = experts;
      row->part.chosen = chosen;
    }
  }
  void attention(const CountedLayer& layer) {
    const bool is_full = layer.window == 0;
    const std::int64_t h = file_["hidden"], a = file_["heads"];
    const std::int64_t d = file_[is_full ? "full_head" : "head"];
    const std::int64_t rank = file_["kv_rank"];
    const std::int64_t value = file_["value"] > 0 ? file_["value"] : d;
    const std::int64_t kv = file_[is_full ? "full_kv" : "kv"];
    const std::int64_t own = layer.shares_keys ? 0 : kv;
    if (rank > 0) {
      for (const BlockPart& part : latent_of(file_)) {
        if (part.kind == PartKind::kAttention) break;  // which may see fewer
        add(part.is_norm() ? "norm" : "attention", part);
      }
    } else {
      const bool one_for_both = is_full && file_["k_is_v"] != 0;
      product("attention", h, (a + own) * d + (one_for_both ? 0 : own * value),
              "q_bias");
    }
    if (file_["qk_norm"] != 0) {
      const bool whole = file_["qk_whole"] != 0, bias = file_["qk_norm_bias"];
      norm("norm", whole ? a * d : d, bias);
      if (own > 0) norm("norm", whole ? kv * d : d, bias);
    }
    if (layer.has_indexer) indexer();
    BlockPart part;
    part.kind = PartKind::kAttention;
    part.heads = a;
    part.out = a * value;
    part.columns = {{a * d, a}, {kv * d, kv}, {kv * value, kv}};
    part.in = a * d + kv * (d + value);
    const std::int64_t selected = file_["selected"];
    part.window = selected > 0 ? selected : layer.window;
    part.in_chunks = file_["chunked"] != 0;
    part.has_sinks = file_[is_full ? "sinks" : "window_sinks"] != 0;
    CountedPart& row = add("attention", part);
    row.latent = rank > 0 ? rank + file_["rope"] : 0;
    row.keeps_all = selected > 0;
    row.keeps_nothing = layer.shares_keys;
    product("attention", a * value, h, "o_bias");
  }
  /// What a layer adds of a second embedding.
  void per_layer(std::int64_t width) {
    const std::int64_t h = file_["hidden"];
    product("mlp", h, width);
    product("mlp", width, h);
    norm("norm", h, false);
  }

 private:
  /// Scores all tokens, by one key for all heads of queries, whose scores a
  /// product of the token weights. No gradient passes.
  void indexer() {
    const std::int64_t h = file_["hidden"], n = file_["index_heads"];
    const std::int64_t d = file_["index_head"];
    const std::size_t first = rows_.size();
    product("attention", file_["q_rank"], n * d);
    product("attention", h, d);
    norm("norm", d, true);
    product("attention", h, n);
    BlockPart part;
    part.kind = PartKind::kAttention;
    part.heads = n;
    part.out = n;
    part.columns = {{n * d, n}, {d, 1}, {0, 1}};
    part.in = n * d + d;
    add("attention", part).latent = d;
    for (std::size_t i = first; i < rows_.size(); ++i) {
      rows_[i].is_detached = true;
    }
  }

  const CountedSizes& file_;
  std::vector<CountedPart> rows_;
};

void add_block(Rows& rows, const CountedSizes& file,
               const CountedLayer& layer) {
  const std::int64_t h = file["hidden"];
  const bool is_beside = file["beside"] != 0;
  rows.norms(file["norms"] + (is_beside ? 3 : 0));
  rows.attention(layer);
  if (file["per_layer"] > 0) rows.per_layer(file["per_layer"]);
  if (!layer.has_experts || is_beside) {
    const bool is_wide = layer.shares_keys && file["wide"] != 0;
    rows.mlp("mlp", (is_wide ? 2 : 1) * file["mlp"], "mlp_bias");
  }
  if (!layer.has_experts) return;
  if (is_beside) {
    // Of the token and of the experts' shares
    rows.norm("router", h, false);
    rows.norm("router", file["experts"], false);
  }
  rows.product("router", h, file["experts"], "router_bias");
  rows.mlp("experts", file["expert"], "expert_bias", file["experts"],
           file["chosen"]);
  if (file["shared"] == 0) return;
  rows.mlp("shared_experts", file["shared"], "mlp_bias");
  if (file["shared_gate"] != 0) rows.product("shared_experts", h, 1);
}

}  // namespace

std::vector<CountedPart> counted_rows(const CountedSizes& sizes) {
  const std::int64_t h = sizes["hidden"], width = sizes["table_width"];
  Rows rows(sizes);
  rows.table(sizes["vocab"], width);
  if (sizes["table_rows"] > 0) rows.table(sizes["table_rows"], h);
  if (sizes["embedding_norm"] != 0) rows.norm("embedding", h, true);
  if (width != h) rows.product("embedding", width, h);
  if (const std::int64_t d = sizes["per_layer"]; d > 0) {
    const auto all = d * static_cast<std::int64_t>(sizes.layers.size());
    rows.table(sizes["per_layer_rows"], all);
    rows.product("mlp", h, all);
    rows.norm("norm", d, false);
  }
  std::vector<CountedLayer> layers = sizes.layers;
  while (!layers.empty()) {
    const CountedLayer first = layers.front();
    const auto others = std::remove(layers.begin(), layers.end(), first);
    rows.times = static_cast<double>(layers.end() - others);
    layers.erase(others, layers.end());
    add_block(rows, sizes, first);
  }
  rows.times = 1;
  if (sizes["final_norm"] != 0) rows.norms(1);
  if (width != h) rows.product("head", h, width);
  rows.product("head", width, sizes["vocab"], "head_bias").is_tied =
      sizes["tied"] != 0;
  return rows.take();
}

ModelConfig nearest_config(const CountedSizes& sizes, const std::string& type) {
  ModelConfig config;
  config.type = type;
  config.is_planned = true;
  config.vocab_size = sizes["vocab"];
  config.n_positions = sizes["positions"];
  config.n_embd = sizes["hidden"];
  config.n_layer = static_cast<std::int64_t>(sizes.layers.size());
  config.n_head = sizes["heads"];
  LlamaConfig& llama = config.llama;
  llama.kv_heads = sizes["kv"];
  llama.head_dim = sizes["head"];
  llama.kv_rank = sizes["kv_rank"];
  if (llama.is_latent()) {
    llama.q_rank = sizes["q_rank"];
    llama.rope_dim = sizes["rope"];
    llama.value_dim = sizes["value"];
  }
  llama.intermediate_size = sizes["mlp"];
  llama.tied = sizes["tied"] != 0;
  llama.qkv_bias = sizes[llama.is_latent() ? "bias" : "q_bias"] != 0;
  llama.o_bias = sizes["o_bias"] != 0;
  llama.mlp_bias = sizes["mlp_bias"] != 0;
  llama.qk_norm = sizes["qk_norm"] != 0;
  llama.num_experts = sizes["experts"];
  llama.experts_per_token = sizes["chosen"];
  llama.moe_intermediate_size = sizes["expert"];
  llama.shared_intermediate_size = sizes["shared"];
  bool has_experts = false;
  for (const CountedLayer& layer : sizes.layers) {
    llama.has_experts.push_back(layer.has_experts);
    has_experts = has_experts || layer.has_experts;
  }
  if (!has_experts) llama.num_experts = llama.shared_intermediate_size = 0;
  return config;
}

}  // namespace shardbook
