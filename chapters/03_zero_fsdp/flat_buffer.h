#pragma once

// Flat parameters: the place and the owner of every element of a model.
//
//   parameters    |   a   |     b     | c |     d     |
//   flat          |   a   |     b     | c |     d     |0|     padded
//   owners        |    rank 0    |    rank 1    |   rank 2   |
//
// ZeRO-1 and -2 store all parameters of one dtype end to end and cut the whole
// into equal shards: a parameter may straddle two owners. ZeRO-3 cuts each
// parameter alone (fsdp/flat_parameter_layout.h). Both answer the same question,
// so both are lists of `OwnedPart`. All of this is arithmetic: print it, test it
// without ranks.
//
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models", section 5.

#include <cstdint>
#include <vector>

#include "core/module.h"

namespace shardbook::zero {

/// Elements [begin, begin + numel) of one parameter; its owner keeps them at
/// [shard_begin, shard_begin + numel) of its shard.
struct OwnedPart {
  int parameter = 0;  ///< place in the list that the layout was made from
  int owner = 0;
  std::int64_t begin = 0;
  std::int64_t shard_begin = 0;
  std::int64_t numel = 0;
};

struct FlatLayout {
  int ranks = 1;
  std::vector<std::int64_t> numels;   ///< of each parameter
  std::vector<std::int64_t> offsets;  ///< of each parameter in the flat buffer
  std::int64_t numel = 0;             ///< of all parameters
  std::int64_t padded = 0;            ///< a multiple of alignment * ranks

  /// Elements of every rank's shard: S. Rank r owns [r S, (r + 1) S).
  std::int64_t shard() const { return padded / ranks; }
  /// The parts of a parameter and their owners, in the order of elements.
  std::vector<OwnedPart> parts(int parameter) const;
};

/// ZeRO-1 and -2: parameters in order, the end padded to a multiple of
/// `alignment` times `ranks` (DeepSpeed: alignment 2). With `round_robin`,
/// parameters i, i + ranks, i + 2 ranks, ... are neighbours, so that
/// consecutive gradients go to different owners.
FlatLayout flat_layout(const std::vector<std::int64_t>& numels, int ranks,
                       std::int64_t alignment, bool round_robin = false);

/// Moves the parameters into one buffer of `layout.padded` elements on
/// `device`: they become views of it, the padding is zero. Values pass through
/// the host, so that the device never holds them twice.
Tensor flatten(const std::vector<NamedTensor>& parameters,
               const FlatLayout& layout, const Device& device);

/// Moves values to the host, until their place on the device exists.
void move_to_host(const std::vector<NamedTensor>& parameters);

}  // namespace shardbook::zero
