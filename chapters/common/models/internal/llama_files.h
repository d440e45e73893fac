#pragma once

// Weights of the Llama family in files and in memory.
//
// In memory, queries, keys and values are one matrix, gate and up projection are
// another, and the experts of a block are stacked. Matrices are [in, out]:
//
//   in memory                                      in files, as [out, in]
//   self_attn.qkv_proj.weight  [h, (a + 2k) d]     q_proj, k_proj, v_proj
//   mlp.gate_up_proj.weight    [h, 2f]             gate_proj, up_proj
//   mlp.experts.gate_up_proj   [E, h, 2f]          experts.0.gate_proj, ...
//   mlp.experts.down_proj      [E, f, h]           experts.0.down_proj, ...
//
// A Mixtral's file has block_sparse_moe for mlp, and w1, w3 and w2 for gate, up
// and down. Tables (embed_tokens, lm_head) are [V, h] in both.

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "core/shards.h"

namespace shardbook {

/// One tensor of a file, and which values of a tensor in memory it has.
struct FilePiece {
  std::string name;
  bool is_transposed = false;  ///< [out, in] in the file
  std::int64_t column = 0;     ///< its first one, in the last dimension
  std::int64_t columns = 0;
  std::int64_t expert = -1;  ///< index in dimension 0; -1: there are none
};

/// A whole tensor in memory.
struct TensorInFiles {
  std::string name;
  Shape shape;
  std::vector<FilePiece> pieces;

  /// The file has this tensor as it is.
  bool is_plain() const {
    return pieces.size() == 1 && !pieces[0].is_transposed;
  }
  Shape shape_in_file(const FilePiece& piece) const;
};

/// All weights of a model, in its order. A tied model has no lm_head.
std::vector<TensorInFiles> llama_weights(const ModelConfig& config);

/// One of them, by its name in memory. Throws Error where the model has none.
TensorInFiles llama_weight(const ModelConfig& config, const std::string& name);

/// Copies a tensor of a file into a part of the one in memory: values of `piece`
/// that `part`, on the host, holds by `shards`. `file` need not be aligned; both
/// have one dtype.
void read_piece(const TensorInFiles& whole, const FilePiece& piece,
                const void* file, const Shards& shards, const Tensor& part);

/// Copies `piece` out of the whole tensor in memory, on the host.
void write_piece(const TensorInFiles& whole, const FilePiece& piece,
                 const Tensor& tensor, void* file);

}  // namespace shardbook
