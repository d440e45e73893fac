#pragma once

// Where each element of a unit's parameters lies: pure arithmetic, no tensors.
//
//   three parameters a b c on 2 ranks         rank 0       rank 1
//   flat (FSDP v1)          [a a a a b|b b c c .]   padded at the very end
//   per parameter (v2)      [a a|a a] [b b|b .] [c|c]   padded one by one
//
// Both use the rule CEIL (torch.chunk): part r of n is [r q, (r+1) q), q =
// ceil(n / d), so the last ranks may hold nothing but padding.

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace shardbook::fsdp {

/// Elements [begin, end) of one parameter (flattened) that a rank holds, and
/// where they begin in its shard.
struct Piece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t shard_offset = 0;
  std::int64_t numel() const { return end - begin; }
};

/// Elements [begin, begin + numel) of a flat tensor, as a view.
inline Tensor part_of(const Tensor& x, std::int64_t begin, std::int64_t numel) {
  return x.flat_view(begin, {numel});
}

struct ShardLayout {
  int num_ranks = 1;
  bool per_parameter = false;
  std::vector<Shape> shapes;
  /// Where each parameter begins in the full buffer of num_ranks * shard_numel
  /// elements, in which every parameter is contiguous.
  std::vector<std::int64_t> full_offset;
  /// v2: elements of each parameter in a shard, padding included.
  std::vector<std::int64_t> chunk;
  std::int64_t numel = 0;        ///< F, without padding
  std::int64_t shard_numel = 0;  ///< S, with padding

  std::int64_t full_numel() const { return num_ranks * shard_numel; }
  std::size_t size() const { return shapes.size(); }
  Piece piece(std::size_t parameter, int rank) const;
};

/// FSDP v1: all parameters end to end, S = ceil(F / d).
ShardLayout flat_layout(const std::vector<Shape>& shapes, int num_ranks);
/// FSDP v2: every parameter is cut along dim 0. ZeRO-3 does the same with
/// flattened parameters. Throws Error for a parameter without dims.
ShardLayout row_layout(const std::vector<Shape>& shapes, int num_ranks);

}  // namespace shardbook::fsdp
