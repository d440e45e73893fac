#include "chapters/common/models/block.h"

#include <charconv>
#include <numeric>
#include <system_error>

#include "chapters/common/models/models.h"
#include "core/check.h"

namespace shardbook {
namespace {

BlockPart norm(const std::string& name, PartKind kind, std::int64_t width,
               std::int64_t heads = 1) {
  BlockPart part;
  part.name = name;
  part.kind = kind;
  part.in = part.out = width;
  part.bias = kind == PartKind::kLayerNorm;
  part.heads = heads;
  return part;
}

/// Several widths in `columns` lie side by side.
BlockPart product(const std::string& name, std::int64_t in,
                  const std::vector<std::int64_t>& columns, bool bias, Cut cut,
                  double stddev) {
  BlockPart part;
  part.name = name;
  part.in = in;
  part.out = std::accumulate(columns.begin(), columns.end(), std::int64_t{0});
  if (columns.size() > 1) part.columns = columns;
  part.bias = bias;
  part.cut = cut;
  part.stddev = stddev;
  return part;
}

BlockPart function(PartKind kind, std::int64_t in, std::int64_t out,
                   std::int64_t heads = 1) {
  BlockPart part;
  part.kind = kind;
  part.in = in;
  part.out = out;
  part.heads = heads;
  return part;
}

BlockTable gpt2(const ModelConfig& c) {
  const std::int64_t h = c.n_embd;
  const double last = residual_stddev(c);
  BlockTable block;
  block.attention_module = "attn";
  block.mlp_module = "mlp";
  block.norm_1 = norm("ln_1", PartKind::kLayerNorm, h);
  block.qkv = product("attn.c_attn", h, {h, h, h}, true, Cut::kColumns,
                      c.initializer_range);
  block.attention = function(PartKind::kAttention, 3 * h, h, c.n_head);
  block.proj = product("attn.c_proj", h, {h}, true, Cut::kRows, last);
  block.norm_2 = norm("ln_2", PartKind::kLayerNorm, h);
  block.up =
      product("mlp.c_fc", h, {4 * h}, true, Cut::kColumns, c.initializer_range);
  block.gate = function(PartKind::kGelu, 4 * h, 4 * h);
  block.down = product("mlp.c_proj", 4 * h, {h}, true, Cut::kRows, last);
  return block;
}

BlockTable llama(const ModelConfig& c) {
  const LlamaConfig& l = c.llama;
  const std::int64_t h = c.n_embd, f = l.intermediate_size;
  const std::int64_t q = c.n_head * l.head_dim, kv = l.kv_heads * l.head_dim;
  const double stddev = c.initializer_range;
  BlockTable block;
  block.attention_module = "self_attn";
  block.mlp_module = "mlp";
  block.norm_1 = norm("input_layernorm", PartKind::kRmsNorm, h);
  block.qkv = product("self_attn.qkv_proj", h, {q, kv, kv}, l.qkv_bias,
                      Cut::kColumns, stddev);
  if (l.qk_norm) {
    block.head_norms = {
        norm("self_attn.q_norm", PartKind::kRmsNorm, q, c.n_head),
        norm("self_attn.k_norm", PartKind::kRmsNorm, kv, l.kv_heads)};
  }
  block.attention = function(PartKind::kAttention, q + 2 * kv, q, c.n_head);
  block.proj =
      product("self_attn.o_proj", q, {h}, l.o_bias, Cut::kRows, stddev);
  block.norm_2 = norm("post_attention_layernorm", PartKind::kRmsNorm, h);
  block.up =
      product("mlp.gate_up_proj", h, {f, f}, l.mlp_bias, Cut::kColumns, stddev);
  block.gate = function(PartKind::kSwiglu, 2 * f, f);
  block.down = product("mlp.down_proj", f, {h}, l.mlp_bias, Cut::kRows, stddev);
  return block;
}

}  // namespace

double BlockPart::kept(double t) const {
  const bool is_cut =
      kind == PartKind::kProduct ? cut == Cut::kRows : !is_norm() || heads > 1;
  return static_cast<double>(in * chosen) / (is_cut ? t : 1);
}

double BlockPart::parameters(double t) const {
  const auto rows = static_cast<double>(in), wide = static_cast<double>(out);
  if (is_norm()) return wide / static_cast<double>(heads) * (bias ? 2 : 1);
  if (kind != PartKind::kProduct) return 0;
  return static_cast<double>(experts) * rows * wide /
             (cut == Cut::kWhole ? 1 : t) +
         (bias ? wide / (cut == Cut::kColumns ? t : 1) : 0);
}

double BlockPart::statistics(double t) const {
  if (kind == PartKind::kLayerNorm) return 2;
  if (kind == PartKind::kRmsNorm || kind == PartKind::kAttention) {
    return static_cast<double>(heads) / (heads > 1 ? t : 1);
  }
  return 0;
}

double BlockPart::operations(double seq) const {
  const auto rows = static_cast<double>(in), wide = static_cast<double>(out);
  if (kind == PartKind::kProduct) {
    return 2 * static_cast<double>(chosen) * rows * wide;
  }
  return kind == PartKind::kAttention ? 2 * (seq + 1) * wide : 0;
}

double BlockPart::backward_operations(double seq) const {
  return (kind == PartKind::kAttention ? 2.5 : 2) * operations(seq);
}

double BlockPart::deferred(double t) const {
  if (kind != PartKind::kProduct) return 0;
  return kept(t) +
         static_cast<double>(out * chosen) / (cut == Cut::kColumns ? t : 1);
}

std::vector<BlockPart> BlockTable::parts() const {
  std::vector<BlockPart> all = {norm_1, qkv};
  all.insert(all.end(), head_norms.begin(), head_norms.end());
  all.insert(all.end(), {attention, proj, norm_2});
  all.insert(all.end(), router.begin(), router.end());
  all.insert(all.end(), {up, gate, down});
  return all;
}

BlockTable block_table(const ModelConfig& config) {
  return config.is_llama() ? llama(config) : gpt2(config);
}

BlockTable block_table(const ModelConfig& config, std::int64_t block) {
  BlockTable table = block_table(config);
  if (!config.llama.has_experts_in(block)) return table;
  const LlamaConfig& l = config.llama;
  const std::int64_t h = config.n_embd, f = l.moe_intermediate_size;
  const double stddev = config.initializer_range;
  table.router = {
      product("mlp.gate", h, {l.num_experts}, false, Cut::kWhole, stddev)};
  table.up = product("mlp.experts.gate_up_proj", h, {f, f}, false, Cut::kWhole,
                     stddev);
  table.gate = function(PartKind::kSwiglu, 2 * f, f);
  table.down =
      product("mlp.experts.down_proj", f, {h}, false, Cut::kWhole, stddev);
  for (BlockPart* part : {&table.up, &table.gate, &table.down}) {
    part->experts = l.num_experts;
    part->chosen = l.experts_per_token;
  }
  return table;
}

std::int64_t block_of(const ModelConfig& config, const std::string& name) {
  const std::string blocks = decoder_names(config).blocks + ".";
  const std::size_t begin = name.rfind(blocks, 0) == 0 ? blocks.size() : 0;
  std::int64_t block = -1;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + begin, end, block);
  SB_CHECK(begin > 0 && error == std::errc() && (rest == end || *rest == '.') &&
               block >= 0 && block < config.n_layer,
           "'", name, "': a ", config.type, " with ", config.n_layer,
           " blocks has no such one");
  return block;
}

DecoderNames decoder_names(const ModelConfig& config) {
  if (!config.is_llama()) {
    return {"transformer.wte", "transformer.wpe", "transformer.h",
            "transformer.ln_f", ""};
  }
  return {"model.embed_tokens", "", "model.layers", "model.norm",
          config.llama.tied ? "" : "lm_head"};
}

}  // namespace shardbook
