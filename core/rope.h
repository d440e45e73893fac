#pragma once

// Rotary position embedding (RoPE): attention learns positions because each
// query and key is turned by an angle that grows with the position of its token.
// A product of a query and a key then depends on the distance of the two alone.
//
//   const std::vector<std::int64_t> positions = {0, 1, 2, 3};
//   const Tensor table = rope_table(positions, /*head_dim=*/64, 10000.0, {});
//   qkv = rope(qkv, table, /*heads=*/12, 64);  // q and k of [q | k | v]
//
// Positions are explicit: a rank of a sequence-parallel group has tokens that
// need not follow one another. Su et al. 2021; in halves, as in Llama's files.

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace shardbook {

/// How a model is stretched to sequences longer than those it was trained on.
struct RopeScaling {
  enum class Kind {
    kNone,
    kLinear,  ///< All angles are divided by `factor`.
    kLlama3,  ///< Those of slow frequencies alone; between, a mixture.
  };
  Kind kind = Kind::kNone;
  double factor = 1;
  /// kLlama3: an angle that turns fewer than `low_freq_factor` times over
  /// `original_positions` is slow, one of more than `high_freq_factor` is fast.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  std::int64_t original_positions = 0;
};

/// Radians per position of pair i < head_dim / 2: theta^(-2i / head_dim), then
/// scaled. Throws Error for an odd head_dim, and for numbers that are not
/// positive or, with kLlama3, factors in the wrong order.
std::vector<double> rope_frequencies(std::int64_t head_dim, double theta,
                                     const RopeScaling& scaling);

/// [positions, head_dim]: row t has the cosines of the angles of positions[t],
/// then their sines. Frequencies, angles and functions are computed in f32 (f64
/// for f64) and rounded to the dtype once. Not recorded for backward. Computed
/// on the host and copied: make one table and use it in all blocks.
Tensor rope_table(const std::vector<std::int64_t>& positions,
                  std::int64_t head_dim, double theta,
                  const RopeScaling& scaling,
                  const TensorOptions& options = {});

/// Turns heads by the angles of their tokens.
///
///   x        [b, s, width]; the first heads * head_dim columns of a row are
///            heads, the others pass through: [q | k | v] with the heads of q
///            and k together needs one call
///   table    [s, head_dim], from rope_table, of x's dtype
///   returns  like x
///
/// Column i of a head is turned with column i + head_dim / 2. Backward turns by
/// the negative angles and keeps the table alone. 3 flops per turned element.
/// 16 bits are rounded once (transformers rounds both products as well).
Tensor rope(const Tensor& x, const Tensor& table, std::int64_t heads,
            std::int64_t head_dim);

}  // namespace shardbook
