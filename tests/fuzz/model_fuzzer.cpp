// Whatever the text of a model's config is, reading it ends in a model that is
// written and read again alike, or in an Error that names the file and can be
// read.

#include "chapters/common/models/models.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::kFuzzedInput;
using shardbook::ModelConfig;
using shardbook::promise;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string text = shardbook::text_of(data, size);
  shardbook::read_or_refuse([&] {
    const ModelConfig config = ModelConfig::from_json(text, kFuzzedInput);
    const std::string written = config.to_json();
    promise(ModelConfig::from_json(written, kFuzzedInput).to_json() == written);
    promise(config.num_classes() > 0);
    if (config.is_image()) {
      promise(!config.depths.empty() && config.width > 0);
    } else {
      promise(config.n_layer > 0 && config.n_embd % config.n_head == 0);
    }
  });
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  return {"",
          "{}",
          R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
          "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072,
          "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
          "attn_pdrop": 0.1, "tie_word_embeddings": true})",
          R"({"model_type": "mlp", "n_embd": 64, "n_layer": 3, "n_head": 1,
          "n_ctx": 128, "n_inner": null})",
          R"({"model_type": "gpt2-with-experts", "hidden_size": 8,
          "num_attention_heads": 2, "n_layers": 2, "pruned_heads": {},
          "activation_function": "gelu", "initializer_range": 0.1})",
          R"({"model_type": "resnet", "hidden_sizes": [16, 32], "depths": [1,
          1], "embedding_size": 16, "id2label": {"0": "a"}, "hidden_act":
          "relu", "downsample_in_bottleneck": false})",
          R"({"model_type": "resnet", "depths": [3, 4, 6, 3], "layer_type":
          "bottleneck", "embedding_size": 64, "num_labels": 1000})"};
}
