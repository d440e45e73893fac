#include "chapters/03_zero_fsdp/zero/zero_buckets.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::zero {
namespace {

/// The padding, which may span several owners.
std::vector<OwnedPart> padding_parts(const ShardLayout& layout) {
  ShardLayout padding = layout;
  padding.shapes = {{layout.full_numel() - layout.numel}};
  padding.offsets = {layout.numel};
  std::vector<OwnedPart> parts = padding.parts(0);
  for (OwnedPart& part : parts) part.parameter = kPadding;
  return parts;
}

/// Gives every part its place: the first `scatter_numel` elements of each owner
/// in the common block, the others after it.
void place(GradientBucket& bucket, std::vector<OwnedPart> parts, int ranks) {
  // In shard order: neighbours stay neighbours
  std::stable_sort(parts.begin(), parts.end(), [](auto& a, auto& b) {
    return a.shard_begin < b.shard_begin;
  });
  std::vector<std::int64_t> count(static_cast<std::size_t>(ranks));
  for (const OwnedPart& part : parts) {
    count[static_cast<std::size_t>(part.owner)] += part.numel;
    bucket.numel += part.numel;
  }
  bucket.scatter_numel = *std::min_element(count.begin(), count.end());

  // The rest, owner by owner
  std::vector<std::int64_t> rest_begin(count.size());
  std::int64_t at = bucket.scatter_numel * ranks;
  for (std::size_t owner = 0; owner < count.size(); ++owner) {
    rest_begin[owner] = at;
    const std::int64_t numel = count[owner] - bucket.scatter_numel;
    if (numel > 0) bucket.rest.push_back({static_cast<int>(owner), at, numel});
    at += numel;
  }

  // A part that crosses the end of the common block becomes two pieces
  std::vector<std::int64_t> done(count.size());
  for (const OwnedPart& part : parts) {
    const auto owner = static_cast<std::size_t>(part.owner);
    for (std::int64_t i = 0; i < part.numel;) {
      const bool in_block = done[owner] < bucket.scatter_numel;
      const std::int64_t room =
          in_block ? bucket.scatter_numel - done[owner] : part.numel - i;
      const std::int64_t numel = std::min(room, part.numel - i);
      const std::int64_t begin =
          in_block ? part.owner * bucket.scatter_numel + done[owner]
                   : rest_begin[owner] + done[owner] - bucket.scatter_numel;
      bucket.pieces.push_back({{part.parameter, part.owner, part.begin + i,
                                part.shard_begin + i, numel},
                               begin});
      done[owner] += numel;
      i += numel;
    }
  }
}

/// A gradient that is reduced in place: its parts are in order already.
void place_large(GradientBucket& bucket, const std::vector<OwnedPart>& parts) {
  bucket.is_large = true;
  for (const OwnedPart& part : parts) {
    bucket.numel += part.numel;
    bucket.rest.push_back({part.owner, part.begin, part.numel});
    bucket.pieces.push_back({part, part.begin});
  }
}

}  // namespace

std::vector<GradientBucket> plan_buckets(const ShardLayout& layout,
                                         std::int64_t bucket_size) {
  SB_CHECK(bucket_size >= 1, "zero: reduce_bucket_size ", bucket_size,
           "; give at least 1 element");
  // Assign parameters to buckets
  std::vector<GradientBucket> buckets;
  std::int64_t filled = 0;
  for (std::size_t i = layout.size(); i-- > 0;) {
    const std::int64_t numel = layout.numel_of(i);
    if (buckets.empty() || filled + numel > bucket_size) {
      buckets.emplace_back();
      filled = 0;
    }
    buckets.back().parameters.push_back(i);
    filled += numel;
  }

  // Place each element
  for (GradientBucket& bucket : buckets) {
    std::vector<OwnedPart> parts, padding;
    for (const std::size_t i : bucket.parameters) {
      const std::vector<OwnedPart> more = layout.parts(i);
      parts.insert(parts.end(), more.begin(), more.end());
      // After the parameter that ends where it begins
      const std::int64_t numel = layout.numel_of(i);
      if (numel > 0 && layout.offsets[i] + numel == layout.numel) {
        padding = padding_parts(layout);
      }
    }
    if (layout.numel_of(bucket.parameters[0]) > bucket_size) {
      place_large(bucket, parts);
      continue;
    }
    parts.insert(parts.end(), padding.begin(), padding.end());
    place(bucket, parts, layout.ranks);
  }
  return buckets;
}

std::vector<BucketPiece> runs_of(const GradientBucket& bucket, int owner) {
  std::vector<BucketPiece> runs;
  for (const BucketPiece& piece : bucket.pieces) {
    if (piece.owner != owner) continue;
    if (!runs.empty()) {
      BucketPiece& last = runs.back();
      if (last.bucket_begin + last.numel == piece.bucket_begin &&
          last.shard_begin + last.numel == piece.shard_begin) {
        last.numel += piece.numel;
        continue;
      }
    }
    runs.push_back(piece);
  }
  return runs;
}

}  // namespace shardbook::zero
