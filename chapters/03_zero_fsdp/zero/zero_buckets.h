#pragma once

// Which gradients travel together, and to whom.
//
// The owner of a gradient is fixed by where its parameter lies in the flat
// buffer, so a bucket may hold much for one owner and nothing for another.
// Equal parts for all owners leave as one reduce-scatter; the rest goes to its
// owners one by one, each by a reduce:
//
//   in the flat buffer    owner 0: a a a a b b | owner 1: b b c | owner 2: d d
//   in the bucket         a a | b b | d d | a a b b | c
//                         reduce_scatter  | reduce  | reduce
//
// Both cost (d-1)/d of their elements, so bytes match the paper whatever the
// size of the buckets. A bucket that holds the whole model, its padding
// included, is one reduce-scatter.
//
// Buckets are made before training, in the reverse order of definition, which
// is (nearly) the order in which gradients come. Buckets leave in the same
// order on all ranks, even if gradients come in another.

#include <cstdint>
#include <vector>

#include "chapters/03_zero_fsdp/shard_layout.h"

namespace shardbook::zero {

/// In place of a parameter: zeros.
constexpr auto kPadding = static_cast<std::size_t>(-1);

/// A run of elements: in a gradient, in its owner's shard, and in its bucket.
struct BucketPiece : OwnedPart {
  std::int64_t bucket_begin = 0;
};

/// Elements [begin, begin + numel) of a bucket, for one owner.
struct OwnedRange {
  int owner = 0;
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

struct GradientBucket {
  std::vector<std::size_t> parameters;  ///< in order of arrival
  std::int64_t numel = 0;
  /// A single gradient larger than a bucket: reduced in place.
  bool is_large = false;
  /// Elements for each owner in the reduce-scatter, which comes first in the
  /// bucket, by owner; 0: no reduce-scatter.
  std::int64_t scatter_numel = 0;
  /// The ranges after it, for the reduces.
  std::vector<OwnedRange> rest;
  std::vector<BucketPiece> pieces;
};

/// Walks the parameters from last to first and closes a bucket when the next
/// gradient would not fit into `bucket_size` elements. The padding travels in
/// the bucket of the parameter before it (unless that gradient is large).
std::vector<GradientBucket> plan_buckets(const ShardLayout& layout,
                                         std::int64_t bucket_size);

/// One owner's pieces, joined if they are neighbours in the bucket and in the
/// shard (`parameter` and `begin` of the first): each is one copy.
std::vector<BucketPiece> runs_of(const GradientBucket& bucket, int owner);

}  // namespace shardbook::zero
