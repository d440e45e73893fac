#pragma once

// How a tensor lies over a mesh of ranks.
//
// A layout has one placement per axis of the mesh: the axis cuts one dim of the
// tensor, holds copies, or holds terms of a sum. Everything here is arithmetic
// on sizes, without ranks or data.
//
//   // 5 rows over a 2 x 2 mesh, both axes cut rows: the first axis cuts
//   // 5 into 3 + 2, the second cuts 3 into 2 + 1 and 2 into 1 + 1.
//   local_part({5}, {shard(0), shard(0)}, {2, 2}, {0, 1});  // row 2
//
// Cuts follow rule CEIL (torch.chunk): each part has ceil(n / P) elements,
// except that trailing parts may be short or empty.

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace shardbook::dtensor {

/// How the terms that the ranks hold make up the tensor.
enum class PartialOp { kSum, kAvg, kMax, kMin };

/// The effect of one axis of the mesh on a tensor.
struct Placement {
  enum class Kind { kReplicate, kShard, kPartial };
  Kind kind = Kind::kReplicate;
  std::int64_t dim = -1;           ///< of the tensor, for a shard
  PartialOp op = PartialOp::kSum;  ///< for a partial
  bool is_replicate() const { return kind == Kind::kReplicate; }
  bool is_shard() const { return kind == Kind::kShard; }
  bool is_shard(std::int64_t of) const { return is_shard() && dim == of; }
  bool is_partial() const { return kind == Kind::kPartial; }
  /// True for partials that matrix products preserve: sums and averages.
  bool is_linear() const {
    return is_partial() && (op == PartialOp::kSum || op == PartialOp::kAvg);
  }
};
bool operator==(const Placement& a, const Placement& b);
bool operator!=(const Placement& a, const Placement& b);

/// Every rank of the axis has all of it.
Placement replicate();
/// The axis cuts `dim`; each rank has one part.
Placement shard(std::int64_t dim);
/// Every rank has a term as large as the tensor.
Placement partial(PartialOp op = PartialOp::kSum);

/// By axis of the mesh, outermost first. Several axes may cut one dim: the
/// first cuts the dim, the next cuts the part that is left.
using Placements = std::vector<Placement>;

/// "R", "S(0)", "P(sum)"; and "(S(0), R)".
std::string text(const Placement& placement);
std::string text(const Placements& placements);

/// The layout of gradients: partials become replicas, since each term of a sum
/// has the gradient of the sum.
Placements normalized(Placements placements);

/// Part `index` of n elements by rule CEIL.
struct Part {
  std::int64_t full = 0;    ///< ceil(n / P), the padded length in collectives
  std::int64_t offset = 0;  ///< of its first element
  std::int64_t size = 0;    ///< 0 for trailing parts that are empty
};
Part ceil_part(std::int64_t n, std::int64_t parts, std::int64_t index);

/// The block of the rank at `coordinate` (one number per axis).
struct Block {
  Shape shape;
  std::vector<std::int64_t> offset;
};
Block local_part(const Shape& global, const Placements& placements,
                 const Shape& mesh,
                 const std::vector<std::int64_t>& coordinate);

/// Throws Error unless there is one placement per axis, and each shard names a
/// dim of the tensor.
void check_placements(const char* where, const Shape& global,
                      const Placements& placements, const Shape& mesh);

}  // namespace shardbook::dtensor
