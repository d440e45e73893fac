#include "chapters/common/models/layer_list.h"

#include "chapters/common/models/resnet.h"
#include "core/check.h"

namespace shardbook {
namespace {

// --- GPT ---------------------------------------------------------------------

class GptLayers : public LayerList {
 public:
  GptLayers(const ModelConfig& config, LayerFactory layers)
      : config_(config), layers_(std::move(layers)) {}
  GptLayers(const ModelConfig& config, LayerFactory layers,
            const LayerFactory& on_shapes)
      : GptLayers(config, std::move(layers)) {
    on_shapes_ = std::make_unique<GptLayers>(config, on_shapes);
  }
  int size() const override { return static_cast<int>(config_.n_layer) + 2; }
  std::string name(int layer) const override {
    const DecoderNames names = decoder_names(config_);
    if (layer == 0) return names.table;
    if (layer == size() - 1) return names.norm;
    return names.block(layer - 1);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    if (layer == 0) {
      return std::make_unique<GptEmbedding>(config_, init, layers_);
    }
    if (layer == size() - 1) {
      return std::make_unique<GptHead>(config_, init, layers_);
    }
    return std::make_unique<Named<GptBlock>>(
        name(layer), GptBlock(name(layer), config_, init, layers_));
  }
  const LayerList& on_shapes() const override {
    return on_shapes_ ? *on_shapes_ : *this;
  }

 private:
  ModelConfig config_;
  LayerFactory layers_;
  std::unique_ptr<GptLayers> on_shapes_;
};

// --- MLP ---------------------------------------------------------------------

/// A linear layer, with ReLU behind it.
class LinearRelu : public ModuleOf<LinearRelu> {
 public:
  LinearRelu(std::string name, Linear linear)
      : name_(std::move(name)), linear_(std::move(linear)) {}
  Tensor forward(const Tensor& x) override { return relu(linear_(x)); }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }
  std::string type_name() const override { return "LinearRelu"; }

 private:
  std::string name_;
  Linear linear_;
};

class MlpLayers : public LayerList {
 public:
  explicit MlpLayers(const ModelConfig& config) : config_(config) {}
  int size() const override { return 4; }
  std::string name(int layer) const override {
    return layer == 0 ? "wte" : "fc" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    const std::int64_t v = config_.vocab_size, h = config_.n_embd;
    switch (layer) {
      case 0:
        return std::make_unique<Named<Embedding>>(
            "wte", Embedding("wte", v, h, init, 1.0));
      case 1:
        return std::make_unique<LinearRelu>("fc1",
                                            Linear("fc1", h, 4 * h, init));
      case 2:
        return std::make_unique<LinearRelu>("fc2",
                                            Linear("fc2", 4 * h, h, init));
      default:
        return std::make_unique<Named<Linear>>("fc3",
                                               Linear("fc3", h, v, init));
    }
  }

 private:
  ModelConfig config_;
};

}  // namespace

std::unique_ptr<LayerList> layers_of(const ModelConfig& config) {
  if (config.type == "mlp") return std::make_unique<MlpLayers>(config);
  if (config.is_image()) return resnet_layers(config);
  return std::make_unique<GptLayers>(config, LayerFactory());
}

std::unique_ptr<LayerList> layers_of(const ModelConfig& config,
                                     const LayerFactory& layers,
                                     const LayerFactory& on_shapes) {
  SB_CHECK(config.has_blocks(), "layers of a ", config.type,
           ": a factory makes those of a decoder");
  return std::make_unique<GptLayers>(config, layers, on_shapes);
}

}  // namespace shardbook
