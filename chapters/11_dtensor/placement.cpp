#include "chapters/11_dtensor/placement.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::dtensor {

bool operator==(const Placement& a, const Placement& b) {
  if (a.kind != b.kind) return false;
  if (a.is_shard()) return a.dim == b.dim;
  return !a.is_partial() || a.op == b.op;
}

bool operator!=(const Placement& a, const Placement& b) { return !(a == b); }

Placement replicate() { return {}; }

Placement shard(std::int64_t dim) {
  Placement placement;
  placement.kind = Placement::Kind::kShard;
  placement.dim = dim;
  return placement;
}

Placement partial(PartialOp op) {
  Placement placement;
  placement.kind = Placement::Kind::kPartial;
  placement.op = op;
  return placement;
}

std::string text(const Placement& placement) {
  if (placement.is_replicate()) return "R";
  if (placement.is_shard()) return "S(" + std::to_string(placement.dim) + ")";
  switch (placement.op) {
    case PartialOp::kSum:
      return "P(sum)";
    case PartialOp::kAvg:
      return "P(avg)";
    case PartialOp::kMax:
      return "P(max)";
    default:
      return "P(min)";
  }
}

std::string text(const Placements& placements) {
  std::string line;
  for (const Placement& placement : placements) {
    line += (line.empty() ? "(" : ", ") + text(placement);
  }
  return line + ")";
}

Placements normalized(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = replicate();
  }
  return placements;
}

Part ceil_part(std::int64_t n, std::int64_t parts, std::int64_t index) {
  Part part;
  part.full = (n + parts - 1) / parts;
  part.offset = std::min(n, index * part.full);
  part.size = std::min(n - part.offset, part.full);
  return part;
}

Block local_part(const Shape& global, const Placements& placements,
                 const Shape& mesh,
                 const std::vector<std::int64_t>& coordinate) {
  Block block{global, std::vector<std::int64_t>(global.size(), 0)};
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    const auto dim = static_cast<std::size_t>(placements[axis].dim);
    const Part part = ceil_part(block.shape[dim], mesh[axis], coordinate[axis]);
    block.shape[dim] = part.size;
    block.offset[dim] += part.offset;
  }
  return block;
}

void check_placements(const char* where, const Shape& global,
                      const Placements& placements, const Shape& mesh) {
  SB_CHECK(placements.size() == mesh.size(), where, ": ", text(placements),
           " are ", placements.size(), " placements for a mesh of ",
           mesh.size(), " axes; give one per axis");
  for (const Placement& placement : placements) {
    if (!placement.is_shard()) continue;
    SB_CHECK(placement.dim >= 0 &&
                 placement.dim < static_cast<std::int64_t>(global.size()),
             where, ": ", text(placement), " of a tensor ", shape_text(global),
             "; shard a dim from 0 to ", global.size() - 1);
  }
}

}  // namespace shardbook::dtensor
