#include <algorithm>
#include <utility>

#include "chapters/common/models/internal/counted_json.h"

namespace shardbook {
namespace {

/// The rows of a model.
class Rows {
 public:
  explicit Rows(const CountedSizes& file) : file_(file) {}

  std::vector<CountedPart> take() { return std::move(rows_); }

  /// How many of the parts that follow there are.
  double times = 1;

  /// `bias` is the number that says whether there is one; empty: there is none.
  CountedPart& product(const std::string& group, std::int64_t in,
                       std::int64_t out, const std::string& bias = "") {
    BlockPart part;
    part.in = in;
    part.out = out;
    part.bias = !bias.empty() && file_[bias] != 0;
    rows_.push_back({group, part, times});
    return rows_.back();
  }
  void table(std::int64_t rows, std::int64_t width) {
    BlockPart part;
    part.kind = PartKind::kTable;
    part.in = rows;
    part.out = width;
    rows_.push_back({"embedding", part, times});
  }
  void norm(const std::string& group, std::int64_t width, bool has_bias) {
    BlockPart part;
    part.kind = has_bias ? PartKind::kLayerNorm : PartKind::kRmsNorm;
    part.in = part.out = width;
    part.bias = has_bias;
    rows_.push_back({group, part, times});
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
  void attention(std::int64_t window) {
    const std::int64_t h = file_["hidden"], a = file_["heads"];
    const std::int64_t d = file_["head"], rank = file_["kv_rank"];
    const std::int64_t value = rank > 0 ? file_["value"] : d;
    const std::int64_t kv = file_["kv"];
    if (rank > 0) {
      latent();
    } else {
      product("attention", h, (a + 2 * kv) * d, "q_bias");
    }
    if (file_["qk_norm"] != 0) {
      const bool whole = file_["qk_whole"] != 0, bias = file_["qk_norm_bias"];
      norm("norm", whole ? a * d : d, bias);
      norm("norm", whole ? kv * d : d, bias);
    }
    BlockPart part;
    part.kind = PartKind::kAttention;
    part.heads = a;
    part.out = a * value;
    part.columns = {{a * d, a}, {kv * d, kv}, {kv * value, kv}};
    part.in = a * d + kv * (d + value);
    part.window = window;
    part.in_chunks = file_["chunked"] != 0;
    part.has_sinks = file_["sinks"] != 0;
    rows_.push_back(
        {"attention", part, times, false, rank > 0 ? rank + file_["rope"] : 0});
    product("attention", a * value, h, "o_bias");
  }

 private:
  /// Queries, keys and values of latent attention.
  void latent() {
    const std::int64_t h = file_["hidden"], a = file_["heads"];
    const std::int64_t rank = file_["kv_rank"], q_rank = file_["q_rank"];
    const std::int64_t q = a * file_["head"];
    if (q_rank > 0) {
      product("attention", h, q_rank, "bias");
      norm("norm", q_rank, false);
    }
    product("attention", q_rank > 0 ? q_rank : h, q);
    product("attention", h, rank + file_["rope"], "bias");
    norm("norm", rank, false);
    product("attention", rank, a * (file_["nope"] + file_["value"]));
  }

  const CountedSizes& file_;
  std::vector<CountedPart> rows_;
};

void add_block(Rows& rows, const CountedSizes& file,
               const CountedLayer& layer) {
  rows.norms(file["norms"]);
  rows.attention(layer.window);
  if (!layer.has_experts) {
    rows.mlp("mlp", file["mlp"], "mlp_bias");
    return;
  }
  rows.product("router", file["hidden"], file["experts"], "router_bias");
  rows.mlp("experts", file["expert"], "expert_bias", file["experts"],
           file["chosen"]);
  if (file["shared"] == 0) return;
  rows.mlp("shared_experts", file["shared"], "mlp_bias");
  if (file["shared_gate"] != 0) {
    rows.product("shared_experts", file["hidden"], 1);
  }
}

}  // namespace

std::vector<CountedPart> counted_rows(const CountedSizes& sizes) {
  const std::int64_t h = sizes["hidden"], width = sizes["table_width"];
  Rows rows(sizes);
  rows.table(sizes["vocab"], width);
  if (sizes["table_rows"] > 0) rows.table(sizes["table_rows"], h);
  if (sizes["embedding_norm"] != 0) rows.norm("embedding", h, true);
  if (width != h) rows.product("embedding", width, h);
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

}  // namespace shardbook
