#pragma once

// The six classes of transformers whose models are of the Llama family: what
// their configs mean where a key is absent, as transformers 5.24 reads them, and
// which keys they have.

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/models/internal/config_keys.h"

namespace shardbook::llama_families {

/// A class of transformers: where a key is absent, and which keys there are.
struct Family {
  const char* type;
  /// LlamaForCausalLM without its ending
  const char* name;
  std::int64_t vocab, hidden, intermediate, blocks, heads;
  std::int64_t kv_heads;  ///< 0: as many as heads
  std::int64_t head_dim;  ///< 0: hidden / heads
  std::int64_t positions;
  double eps, theta;
  std::int64_t window;  ///< "sliding_window"
  // A null in place of a default
  bool may_lack_kv_heads, may_lack_head_dim;
  bool has_attention_bias, has_mlp_bias;  ///< these keys
  bool has_window_switch;                 ///< "use_sliding_window"
  bool has_layer_types;
  std::int64_t experts = 0, experts_per_token = 0;
};

/// Throws Error for a type that is none of them.
const Family& family_of(const std::string& type);

/// Keys with one value that agrees with this class.
std::vector<config_keys::FixedKey> fixed_keys(const Family& family);
/// Keys that have an effect in this class, without the sizes.
std::vector<std::string> keys_read(const Family& family);

}  // namespace shardbook::llama_families
