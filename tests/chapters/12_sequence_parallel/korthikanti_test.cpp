// Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
// Transformer Models", table 2: what one layer keeps, counted by the allocator.
//
// The paper's layer keeps dropout's masks, a byte per element, and attention's
// scores. Such layers, composed here of smaller operations, match the paper's
// formulas to the byte. This book's layers draw masks again and never keep a
// row of scores: they have formulas of their own, and both are tested here.

#include <cmath>
#include <memory>

#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "tests/chapters/12_sequence_parallel/sequence_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::sequence_parallel {
namespace {

struct Sizes {
  int t = 1;
  std::int64_t b = 2, s = 24, h = 96, heads = 12;
};
struct Variant {
  bool has_sequence = false;  ///< Megatron's sequence parallelism
  bool selective = false, full = false;
  bool is_papers = false;  ///< keeps masks and scores
};

// --- The paper's layers ------------------------------------------------------

/// Dropout that keeps its mask, a byte per element. On shapes alone.
Tensor dropout_with_mask(const Tensor& x) {
  return autograd::custom_function(
      "dropout_with_mask", {x},
      [](const Tensors& in) { return Tensors{in[0].empty_like()}; },
      [mask = Tensor::empty({x.numel() / 4}, {DType::kI32, x.device()})](
          const Tensors& grads) { return Tensors{grads[0].empty_like()}; })[0];
}

class MaskedDropout : public ModuleOf<MaskedDropout> {
 public:
  Tensor forward(const Tensor& x) override { return dropout_with_mask(x); }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "Dropout"; }
};

/// Attention that keeps Q, K, V, the softmax, its mask and what dropout left.
Tensor attention_with_scores(const Tensor& qkv, std::int64_t heads) {
  const std::int64_t b = qkv.size(0), s = qkv.size(1);
  const std::int64_t d = qkv.size(2) / 3 / heads;
  const auto by_head = [&](const Tensor& x) {
    return reshape(permute(reshape(x, {b, s, heads, d}), {0, 2, 1, 3}),
                   {b * heads, s, d});
  };
  const Tensors parts = split_qkv(qkv);
  const Tensor scores =
      scale(matmul(by_head(parts[0]), by_head(parts[1]), false, true),
            1 / std::sqrt(static_cast<double>(d)));
  const Tensor weights = dropout_with_mask(softmax(scores));
  const Tensor out = matmul(weights, by_head(parts[2]));
  return reshape(permute(reshape(out, {b, heads, s, d}), {0, 2, 1, 3}),
                 {b, s, heads * d});
}

LayerFactory layers_of(const ModelConfig& config, const Variant& variant,
                       ProcessGroup& tp) {
  MegatronOptions setup;
  setup.recompute_attention = variant.selective;
  LayerFactory made = variant.has_sequence
                          ? megatron_layers(config, tp, setup)
                          : tensor_parallel::layers(config, tp);
  if (variant.is_papers) {
    made.dropout = [](double) -> AnyModule {
      return {std::make_unique<MaskedDropout>()};
    };
    made.attention = [](const Tensor& qkv, const AttentionOptions& options) {
      return attention_with_scores(qkv, options.heads);
    };
    if (variant.selective) made = recomputing_attention(made);
  } else if (variant.selective && !variant.has_sequence) {
    made = recomputing_attention(made);
  }
  return made;
}

// --- The count ---------------------------------------------------------------

std::int64_t activations() {
  return RankContext::current().device.memory().current(
      MemoryKind::kActivation);
}

/// Bytes that each block of a 16-bit model but the first keeps after forward.
double kept_per_layer(const Sizes& sizes, const Variant& variant) {
  ModelConfig config;
  config.n_embd = sizes.h;
  config.n_head = sizes.heads;
  config.n_layer = 3;
  config.dropout = 0.1;
  double kept = 0;
  textbook::run_on_shapes(
      textbook::mlp_options(sizes.t, 1), sizes.t, [&](ProcessGroup& world) {
        const LayerFactory layers = layers_of(config, variant, world);
        InitOptions init;
        init.dtype = DType::kBF16;
        const std::int64_t own =
            variant.has_sequence ? sizes.s / sizes.t : sizes.s;
        Tensor x =
            Tensor::empty({sizes.b, own, sizes.h}, {DType::kBF16, Device()});
        x.set_requires_grad();
        std::vector<GptBlock> blocks;
        std::int64_t before = 0;
        for (int i = 0; i < 3; ++i) {
          blocks.emplace_back("transformer.h." + std::to_string(i), config,
                              init, layers);
        }
        for (GptBlock& block : blocks) {
          block.recompute = variant.full;
          before = activations();
          x = block(x);
          const double grown = static_cast<double>(activations() - before);
          if (&block != &blocks[0]) kept = grown;
        }
      });
  return kept;
}

// --- The formulas ------------------------------------------------------------

/// Table 2, plus the statistics of two norms, a mean and a deviation of 4 bytes
/// each, which the paper omits.
double of_paper(const Sizes& z, const Variant& variant) {
  const double s = static_cast<double>(z.s), b = static_cast<double>(z.b);
  const double h = static_cast<double>(z.h), t = z.t;
  const double sbh = s * b * h;
  if (variant.full) return 2 * sbh / (variant.has_sequence ? t : 1);
  const double scores =
      variant.selective ? 0 : 5 * static_cast<double>(z.heads) * s / h;
  if (variant.has_sequence) return sbh / t * (34 + scores) + 16 * s * b / t;
  return sbh * (10 + 24 / t + scores / t) + 16 * s * b;
}

/// The same without two masks and without scores, and with the logarithm of
/// each softmax's sum.
double of_book(const Sizes& z, const Variant& variant) {
  const double s = static_cast<double>(z.s), b = static_cast<double>(z.b);
  const double h = static_cast<double>(z.h), t = z.t;
  const double sbh = s * b * h;
  if (variant.full) return 2 * sbh / (variant.has_sequence ? t : 1);
  const double sums =
      variant.selective ? 0 : 4 * static_cast<double>(z.heads) * s * b / t;
  if (variant.has_sequence) return sbh / t * 32 + 16 * s * b / t + sums;
  return sbh * (8 + 24 / t) + 16 * s * b + sums;
}

TEST(Korthikanti, EveryVariantKeepsWhatItsFormulaSays) {
  for (const Sizes& sizes :
       {Sizes{1}, Sizes{2}, Sizes{4, 1, 16, 64, 8}, Sizes{3, 3, 30, 36, 6}}) {
    for (const bool has_sequence : {false, true}) {
      for (const int recomputed : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message()
                     << "t " << sizes.t << (has_sequence ? " sequence" : "")
                     << " recomputed " << recomputed);
        Variant variant{has_sequence, recomputed == 1, recomputed == 2, true};
        EXPECT_DOUBLE_EQ(kept_per_layer(sizes, variant),
                         of_paper(sizes, variant));
        variant.is_papers = false;
        EXPECT_DOUBLE_EQ(kept_per_layer(sizes, variant),
                         of_book(sizes, variant));
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::sequence_parallel
