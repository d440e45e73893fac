#pragma once

// Latent attention's queries, keys and values: products and norms that block.h has
// the rows of, then one copy that lays them out by heads.
//
//   q      [a rope | a nope]       from x or from its own latent vector
//   kv     [a nope | a value]      from the latent vector of keys and values
//   turns  [rope]                  one for all heads, behind its turn
//
//   -> [ q of a heads | k of a heads | v of a heads ], head by head
//         rope nope      turns nope     value

#include <string>

#include "chapters/common/models/models.h"

namespace shardbook {

/// The heads of one rank.
struct LatentHeads {
  std::int64_t heads = 0, rope = 0, nope = 0, value = 0;
  /// Columns of [q | k | v].
  std::int64_t row() const { return heads * (2 * (rope + nope) + value); }
};

/// [q | k | v] for core's attention, in one pass over the memory; keeps nothing for
/// its backward.
///
///   q      [n, S, a (rope + nope)]    turned
///   kv     [n, S, a (nope + value)]
///   turns  [n, S, rope]               turned
///   returns [n, S, row()]
Tensor lay_out_heads(const Tensor& q, const Tensor& kv, const Tensor& turns,
                     const LatentHeads& sizes);

/// [n, S, h] -> [n, S, row()], of the heads of the rank of `layers`. Names are
/// transformers': q_a_proj, q_a_layernorm, q_b_proj (or q_proj),
/// kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj.
AnyModule latent_products(const std::string& name, const BlockTable& block,
                          const ModelConfig& config, const InitOptions& init,
                          const LayerFactory& layers);

}  // namespace shardbook
