#include "chapters/common/models/internal/llama_json.h"

#include <algorithm>
#include <array>
#include <utility>

#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/llama_families.h"
#include "chapters/common/models/internal/llama_rope.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using nlohmann::json;
using namespace config_keys;
using namespace llama_families;

bool is_null(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_null();
}

// Larger than any that fits; they keep products of sizes below 2^63.
constexpr std::int64_t kMostHidden = 1 << 20;
constexpr std::int64_t kMostHeads = 1 << 14;
constexpr std::int64_t kMostHeadDim = 1 << 12;
constexpr std::int64_t kMostBlocks = 1 << 12;
constexpr std::int64_t kMostMlp = 1 << 22;
constexpr std::int64_t kMostExperts = 1 << 14;
constexpr double kMostParameters = 1e18;

void read_sizes(const json& object, const std::string& label,
                const Family& family, ModelConfig& config) {
  struct Size {
    const char* key;
    std::int64_t* value;
    std::int64_t absent, most;
  };
  for (const Size& size :
       {Size{"vocab_size", &config.vocab_size, family.vocab, kMostOfASize},
        Size{"max_position_embeddings", &config.n_positions, family.positions,
             kMostOfASize},
        Size{"hidden_size", &config.n_embd, family.hidden, kMostHidden},
        Size{"intermediate_size", &config.llama.intermediate_size,
             family.intermediate, kMostMlp},
        Size{"num_hidden_layers", &config.n_layer, family.blocks, kMostBlocks},
        Size{"num_attention_heads", &config.n_head, family.heads,
             kMostHeads}}) {
    *size.value = size.absent;
    read_size(object, label, size.key, size.value, size.most);
  }
}

/// A size that some classes accept as null, which means `implied`.
std::int64_t read_or_null(const json& object, const std::string& label,
                          const char* key, bool may_be_null,
                          std::int64_t implied, std::int64_t absent,
                          std::int64_t most) {
  if (may_be_null && is_null(object, key)) return implied;
  std::int64_t value = absent > 0 ? absent : implied;
  read_size(object, label, key, &value, most);
  return value;
}

void read_heads(const json& object, const std::string& label,
                const Family& family, ModelConfig& config) {
  LlamaConfig& llama = config.llama;
  const std::int64_t hidden = config.n_embd, heads = config.n_head;
  // transformers checks this for Llama alone, even with a head_dim
  SB_CHECK(config.type != "llama" || hidden % heads == 0, label,
           ": hidden_size ", hidden,
           " is not a multiple of num_attention_heads ", heads);
  llama.kv_heads = read_or_null(object, label, "num_key_value_heads",
                                family.may_lack_kv_heads,
                                /*implied=*/heads, family.kv_heads, kMostHeads);
  const bool is_given = object.contains("num_key_value_heads");
  SB_CHECK(heads % llama.kv_heads == 0, label, ": \"num_key_value_heads\" is ",
           llama.kv_heads, is_given ? "" : " where it is absent",
           ", which does not divide num_attention_heads ", heads);
  llama.head_dim =
      read_or_null(object, label, "head_dim", family.may_lack_head_dim,
                   /*implied=*/hidden / heads, family.head_dim, kMostHeadDim);
  SB_CHECK(llama.head_dim > 0 && llama.head_dim % 2 == 0 &&
               llama.head_dim <= kMostHeadDim,
           label, ": heads have the width ", llama.head_dim,
           "; rotary positions turn the halves of a head: give an even "
           "head_dim, at most ",
           kMostHeadDim);
}

void read_biases(const json& object, const std::string& label,
                 const Family& family, ModelConfig& config) {
  LlamaConfig& llama = config.llama;
  bool on_attention = false;
  if (family.has_attention_bias) {
    read_flag(object, label, "attention_bias", &on_attention);
  }
  if (family.has_mlp_bias) {
    read_flag(object, label, "mlp_bias", &llama.mlp_bias);
  }
  const bool is_qwen2 = config.type == "qwen2";
  llama.qkv_bias = on_attention || is_qwen2;
  llama.o_bias = on_attention;
  llama.qk_norm = config.type == "qwen3" || config.type == "qwen3_moe";
  // Keys that the classes pass over may say what they do
  for (const auto& [key, value] : {std::pair("qkv_bias", llama.qkv_bias),
                                   std::pair("use_qk_norm", llama.qk_norm)}) {
    bool stated = value;
    read_flag(object, label, key, &stated);
    SB_CHECK(stated == value, label, ": \"", key, "\" is ",
             stated ? "true" : "false",
             ", which transformers passes over in a ", config.type,
             ": here it is ", value ? "true" : "false");
  }
}

/// Which blocks slide by "layer_types"; all or none of them where the key is
/// absent and `by_default` says so.
std::vector<std::int64_t> sliding_blocks(
    const json& object, const std::string& label, std::int64_t blocks,
    const std::vector<std::int64_t>& by_default) {
  const auto found = object.find("layer_types");
  if (found == object.end() || found->is_null()) return by_default;
  const auto good = [](const json& type) {
    return type == "full_attention" || type == "sliding_attention";
  };
  SB_CHECK(found->is_array() && std::all_of(found->begin(), found->end(), good),
           label, ": \"layer_types\" is ", json_file::shown(*found),
           "; give \"full_attention\" or \"sliding_attention\" for each layer");
  SB_CHECK(static_cast<std::int64_t>(found->size()) == blocks, label,
           ": \"layer_types\" has ", found->size(),
           " layers, and num_hidden_layers is ", blocks);
  std::vector<std::int64_t> sliding;
  for (std::size_t i = 0; i < found->size(); ++i) {
    if ((*found)[i] == "sliding_attention") {
      sliding.push_back(static_cast<std::int64_t>(i));
    }
  }
  return sliding;
}

/// The window, before it is known which blocks have it; 0: none.
std::int64_t window_of(const json& object, const std::string& label,
                       const Family& family) {
  std::int64_t window = family.window;
  if (is_null(object, "sliding_window")) {
    window = 0;
  } else {
    read_size(object, label, "sliding_window", &window);
  }
  bool is_on = false;
  read_flag(object, label, "use_sliding_window", &is_on);
  if (family.has_window_switch) return is_on ? window : 0;
  const bool has_switch = object.contains("use_sliding_window");
  if (std::string(family.type) == "llama") {
    SB_CHECK(!is_on && (window == 0 || has_switch), label, ": \"",
             is_on ? "use_sliding_window" : "sliding_window",
             "\" says that a window slides, but a llama sees all tokens; give "
             "\"sliding_window\": null");
    return 0;
  }
  SB_CHECK(!has_switch || is_on == (window > 0), label,
           ": \"use_sliding_window\" is ", is_on ? "true" : "false",
           ", which transformers passes over in a ", family.type,
           "; sliding_window alone decides");
  return window;
}

void read_window(const json& object, const std::string& label,
                 const Family& family, ModelConfig& config) {
  LlamaConfig& llama = config.llama;
  const std::int64_t window = window_of(object, label, family);
  std::int64_t first = 0;
  if (family.has_layer_types) {
    first = 28;  // of transformers' classes
    // At 0, all layers slide
    if (!object.contains("max_window_layers") ||
        object["max_window_layers"] != 0) {
      read_size(object, label, "max_window_layers", &first);
    } else {
      first = 0;
    }
  }
  std::vector<std::int64_t> blocks;
  for (std::int64_t i = window > 0 ? first : config.n_layer; i < config.n_layer;
       ++i) {
    blocks.push_back(i);
  }
  const auto stated = sliding_blocks(object, label, config.n_layer, blocks);
  // The other classes pass over layer_types
  if (family.has_layer_types) {
    blocks = stated;
    SB_CHECK(blocks.empty() || window > 0, label,
             ": \"layer_types\" has \"sliding_attention\", but there is no "
             "sliding_window, or use_sliding_window is false");
  } else {
    SB_CHECK(stated.empty() || stated == blocks, label,
             ": \"layer_types\" has \"sliding_attention\", and transformers "
             "passes over layer_types in a ",
             config.type, "; remove it");
  }
  llama.sliding_blocks = blocks;
  llama.sliding_window = blocks.empty() ? 0 : window;
}

void read_experts(const json& object, const std::string& label,
                  const Family& family, ModelConfig& config) {
  if (family.experts == 0) return;
  LlamaConfig& llama = config.llama;
  const bool is_mixtral = config.type == "mixtral";
  // Of two names of one number, transformers' classes take the second here
  std::array<const char*, 2> names = {"num_experts", "num_local_experts"};
  if (is_mixtral) std::swap(names[0], names[1]);
  llama.num_experts = family.experts;
  for (const char* name : names) {
    read_size(object, label, name, &llama.num_experts, kMostExperts);
  }
  llama.experts_per_token = family.experts_per_token;
  read_size(object, label, "num_experts_per_tok", &llama.experts_per_token);
  SB_CHECK(llama.experts_per_token <= llama.num_experts, label,
           ": \"num_experts_per_tok\" is ", llama.experts_per_token,
           ", and there are ", llama.num_experts, " experts");
  llama.router_aux_loss_coef = 0.001;
  if (!object.contains("router_aux_loss_coef") ||
      object["router_aux_loss_coef"] != 0) {
    read_positive(object, label, "router_aux_loss_coef",
                  &llama.router_aux_loss_coef);
  } else {
    llama.router_aux_loss_coef = 0;
  }
  read_flag(object, label, "output_router_logits", &llama.output_router_logits);
  llama.has_experts.assign(static_cast<std::size_t>(config.n_layer), true);
  if (is_mixtral) {
    llama.norm_topk_prob = true;
    llama.moe_intermediate_size = llama.intermediate_size;
    return;
  }
  read_flag(object, label, "norm_topk_prob", &llama.norm_topk_prob);
  llama.moe_intermediate_size = 768;
  read_size(object, label, "moe_intermediate_size",
            &llama.moe_intermediate_size, kMostMlp);
  std::int64_t step = 1;
  read_size(object, label, "decoder_sparse_step", &step);
  const json dense = object.value("mlp_only_layers", json::array());
  SB_CHECK(
      dense.is_null() ||
          (dense.is_array() && dense.size() <= kMostBlocks &&
           std::all_of(dense.begin(), dense.end(),
                       [](const json& i) { return i.is_number_integer(); })),
      label, ": \"mlp_only_layers\" is ", json_file::shown(dense),
      "; give a list of numbers of layers");
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    llama.has_experts[static_cast<std::size_t>(i)] =
        (i + 1) % step == 0 &&
        std::find(dense.begin(), dense.end(), json(i)) == dense.end();
  }
}

/// Products of sizes must fit into 64 bits.
void check_fits(const ModelConfig& config, const std::string& label) {
  const LlamaConfig& llama = config.llama;
  const auto widths = static_cast<double>(std::max(
      llama.intermediate_size, std::max<std::int64_t>(llama.num_experts, 1) *
                                   llama.moe_intermediate_size));
  const double about = static_cast<double>(config.n_layer) *
                       static_cast<double>(config.n_embd) * 3 * widths;
  SB_CHECK(about < kMostParameters, label, ": the MLPs have more than ",
           kMostParameters, " parameters");
}

}  // namespace

ModelConfig llama_from_json(const json& object, const std::string& label,
                            const std::string& type) {
  const Family& family = family_of(type);
  ModelConfig config;
  config.type = type;
  const std::vector<FixedKey> fixed = fixed_keys(family);
  for (const FixedKey& key : fixed) check_fixed(object, label, key);
  check_keys(object, label, keys_read(family), fixed,
             {"hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "max_position_embeddings"},
             harmless_in_llama(),
             "a decoder with rotary positions, RMSNorm and SwiGLU");
  check_architecture(object, label,
                     {std::string(family.name) + "ForCausalLM",
                      std::string(family.name) + "Model"});
  read_sizes(object, label, family, config);
  config.layer_norm_epsilon = family.eps;
  read_fraction(object, label, "rms_norm_eps", &config.layer_norm_epsilon);
  read_fraction(object, label, "initializer_range", &config.initializer_range);
  // Of the published model's own training: ours is --dropout
  if (!is_null(object, "attention_dropout")) {
    double unused = 0;
    read_fraction(object, label, "attention_dropout", &unused);
  }
  read_flag(object, label, "tie_word_embeddings", &config.llama.tied);
  read_heads(object, label, family, config);
  read_biases(object, label, family, config);
  read_rope(object, label, family.theta, config);
  read_window(object, label, family, config);
  read_experts(object, label, family, config);
  check_fits(config, label);
  return config;
}

json llama_to_json(const ModelConfig& config) {
  const LlamaConfig& llama = config.llama;
  const Family& family = family_of(config.type);
  json object = {{"model_type", config.type},
                 {"architectures", {std::string(family.name) + "ForCausalLM"}},
                 {"vocab_size", config.vocab_size},
                 {"max_position_embeddings", config.n_positions},
                 {"hidden_size", config.n_embd},
                 {"intermediate_size", llama.intermediate_size},
                 {"num_hidden_layers", config.n_layer},
                 {"num_attention_heads", config.n_head},
                 {"num_key_value_heads", llama.kv_heads},
                 {"head_dim", llama.head_dim},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", config.layer_norm_epsilon},
                 {"initializer_range", config.initializer_range},
                 {"tie_word_embeddings", llama.tied},
                 {"attention_dropout", config.dropout},
                 // Both versions read these; 4.57 does not know rope_parameters
                 {"rope_theta", llama.rope_theta},
                 {"rope_scaling", rope_to_json(llama.rope)},
                 // Bytes have no token that begins or ends a text.
                 {"bos_token_id", nullptr},
                 {"eos_token_id", nullptr}};
  if (family.has_attention_bias) object["attention_bias"] = llama.o_bias;
  if (family.has_mlp_bias) object["mlp_bias"] = llama.mlp_bias;
  const bool slides = llama.sliding_window > 0;
  if (config.type != "llama") {
    object["sliding_window"] = slides ? json(llama.sliding_window) : json();
  }
  if (family.has_window_switch) object["use_sliding_window"] = slides;
  if (family.has_layer_types) {
    std::vector<std::string> types(static_cast<std::size_t>(config.n_layer),
                                   "full_attention");
    for (const std::int64_t block : llama.sliding_blocks) {
      types[static_cast<std::size_t>(block)] = "sliding_attention";
    }
    object["layer_types"] = types;
  }
  if (family.experts == 0) return object;
  object.update({{"num_local_experts", llama.num_experts},
                 {"num_experts_per_tok", llama.experts_per_token},
                 {"router_aux_loss_coef", llama.router_aux_loss_coef},
                 {"output_router_logits", llama.output_router_logits}});
  if (config.type == "mixtral") return object;
  std::vector<std::int64_t> dense;
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    if (!llama.has_experts_in(i)) dense.push_back(i);
  }
  object.update({{"num_experts", llama.num_experts},  // 4.57 reads this one
                 {"norm_topk_prob", llama.norm_topk_prob},
                 {"moe_intermediate_size", llama.moe_intermediate_size},
                 {"decoder_sparse_step", 1},
                 {"mlp_only_layers", dense}});
  return object;
}

}  // namespace shardbook
