#pragma once

// Which rank holds which elements of a list of parameters: arithmetic. Print it,
// test it without ranks.
//
//   end to end    |   a   |     b     | c |     d     |0|     padded at the end
//   owners        |    rank 0    |    rank 1    |   rank 2   |
//
//   one by one    |a a|b b b|c|d d d|a a|b b b|c|d d d|a .|b b .|c|d d .|
//   owners        |     rank 0      |     rank 1      |     rank 2      |
//
// ZeRO-1, ZeRO-2 and FSDP v1 store parameters end to end and cut the whole into
// equal shards: a parameter may straddle two owners. ZeRO-3 and FSDP v2 cut each
// parameter alone, by the rule CEIL (torch.chunk): part r of n is [r q, (r+1) q),
// q = ceil(n / d), so the last ranks may hold nothing but padding.
//
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models", section 5.

#include <cstdint>
#include <vector>

#include "core/module.h"

namespace shardbook::zero {

/// Elements [begin, begin + numel) of one parameter, flattened; the owner keeps
/// them at [shard_begin, shard_begin + numel) of its shard.
struct OwnedPart {
  std::size_t parameter = 0;  ///< place in the list of the layout
  int owner = 0;
  std::int64_t begin = 0;
  std::int64_t shard_begin = 0;
  std::int64_t numel = 0;

  /// These elements of a shard, and of the flattened parameter: views.
  Tensor of_shard(const Tensor& shard) const {
    return shard.flat_view(shard_begin, {numel});
  }
  Tensor of_whole(const Tensor& parameter) const {
    return parameter.flat_view(begin, {numel});
  }
};

struct ShardLayout {
  int ranks = 1;
  bool per_parameter = false;
  std::vector<Shape> shapes;
  /// Where each parameter begins in the full buffer of ranks * shard_numel
  /// elements, in which every parameter is contiguous.
  std::vector<std::int64_t> offsets;
  /// One by one: elements of each parameter in a shard, padding included.
  std::vector<std::int64_t> chunk;
  std::int64_t numel = 0;        ///< F, without padding
  std::int64_t shard_numel = 0;  ///< S, with padding

  std::int64_t full_numel() const { return ranks * shard_numel; }
  std::size_t size() const { return shapes.size(); }
  std::int64_t numel_of(std::size_t parameter) const {
    return shape_numel(shapes[parameter]);
  }
  /// The part of a parameter that a rank owns; it may be empty.
  OwnedPart part(std::size_t parameter, int rank) const;
  /// All parts of a parameter that are not empty, in the order of elements.
  std::vector<OwnedPart> parts(std::size_t parameter) const;
  /// All parts of a rank that are not empty, in the order of parameters.
  std::vector<OwnedPart> parts_of_rank(int rank) const;
};

/// End to end, the end padded to a multiple of `alignment` times `ranks`
/// (DeepSpeed: alignment 2). With `round_robin`, parameters i, i + ranks, i + 2
/// ranks, ... are neighbours, so that consecutive gradients go to different
/// owners.
ShardLayout flat_layout(const std::vector<Shape>& shapes, int ranks,
                        std::int64_t alignment = 1, bool round_robin = false);
/// Every parameter is cut along dim 0; ZeRO-3 flattens it first. Throws Error
/// for a parameter without dims.
ShardLayout row_layout(const std::vector<Shape>& shapes, int ranks);

std::vector<Shape> shapes_of(const std::vector<NamedTensor>& parameters);

/// Moves the parameters into one buffer on `device`, with a layout end to end:
/// they become views of it, the padding is zero. Values pass through the host,
/// so that the device never holds them twice.
Tensor flatten(const std::vector<NamedTensor>& parameters,
               const ShardLayout& layout, const Device& device);

/// Moves values to the host, until their place on the device exists.
void move_to_host(const std::vector<NamedTensor>& parameters);

}  // namespace shardbook::zero
