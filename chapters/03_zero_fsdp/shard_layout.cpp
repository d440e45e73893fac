#include "chapters/03_zero_fsdp/shard_layout.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {

ShardLayout flat_layout(const std::vector<Shape>& shapes, int ranks,
                        std::int64_t alignment, bool round_robin) {
  SB_CHECK(alignment >= 1, "zero: alignment ", alignment,
           "; give at least 1 element");
  ShardLayout layout;
  layout.ranks = ranks;
  layout.shapes = shapes;
  layout.offsets.resize(shapes.size());
  const std::size_t stride = round_robin ? static_cast<std::size_t>(ranks) : 1;
  for (std::size_t first = 0; first < stride; ++first) {
    for (std::size_t i = first; i < shapes.size(); i += stride) {
      layout.offsets[i] = layout.numel;
      layout.numel += shape_numel(shapes[i]);
    }
  }
  const std::int64_t multiple = alignment * ranks;
  layout.shard_numel = (layout.numel + multiple - 1) / multiple * alignment;
  return layout;
}

ShardLayout row_layout(const std::vector<Shape>& shapes, int ranks) {
  ShardLayout layout;
  layout.ranks = ranks;
  layout.per_parameter = true;
  layout.shapes = shapes;
  for (const Shape& shape : shapes) {
    SB_CHECK(!shape.empty(),
             "fully_shard: a parameter of shape [] has no dim "
             "0 to shard; give it shape [1]");
    const std::int64_t rows = (shape[0] + ranks - 1) / ranks;
    const std::int64_t row = shape[0] == 0 ? 0 : shape_numel(shape) / shape[0];
    layout.offsets.push_back(layout.full_numel());
    layout.chunk.push_back(rows * row);
    layout.numel += shape_numel(shape);
    layout.shard_numel += rows * row;
  }
  return layout;
}

OwnedPart ShardLayout::part(std::size_t parameter, int rank) const {
  // This rank's elements, counted from the parameter's first
  const std::int64_t n = numel_of(parameter), offset = offsets[parameter];
  const std::int64_t first =
      per_parameter ? rank * chunk[parameter] : rank * shard_numel - offset;
  const std::int64_t count = per_parameter ? chunk[parameter] : shard_numel;
  OwnedPart part{parameter, rank};
  part.begin = std::clamp<std::int64_t>(first, 0, n);
  part.numel = std::clamp<std::int64_t>(first + count, 0, n) - part.begin;
  if (per_parameter) {
    part.shard_begin = offset / ranks;
  } else if (part.numel > 0) {
    part.shard_begin = part.begin - first;
  }
  return part;
}

std::vector<OwnedPart> ShardLayout::parts(std::size_t parameter) const {
  std::vector<OwnedPart> found;
  // The owners follow each other
  std::int64_t left = numel_of(parameter), owner = 0;
  if (left > 0 && !per_parameter) owner = offsets[parameter] / shard_numel;
  for (; left > 0; left -= found.back().numel) {
    found.push_back(part(parameter, static_cast<int>(owner++)));
  }
  return found;
}

std::vector<OwnedPart> ShardLayout::parts_of_rank(int rank) const {
  std::vector<OwnedPart> found;
  for (std::size_t i = 0; i < size(); ++i) {
    const OwnedPart own = part(i, rank);
    if (own.numel > 0) found.push_back(own);
  }
  return found;
}

std::vector<Shape> shapes_of(const std::vector<NamedTensor>& parameters) {
  std::vector<Shape> shapes;
  for (const NamedTensor& p : parameters) shapes.push_back(p.tensor.shape());
  return shapes;
}

void move_to_host(const std::vector<NamedTensor>& parameters) {
  MemoryScope kind(MemoryKind::kParameter);
  const Device& host = RankContext::current().host();
  for (NamedTensor entry : parameters) {
    if (entry.tensor.device() == host) continue;
    const Tensor copy =
        Tensor::empty(entry.tensor.shape(), {entry.tensor.dtype(), host});
    copy.copy_from(entry.tensor);
    set_data(entry.tensor, copy);
  }
}

Tensor flatten(const std::vector<NamedTensor>& parameters,
               const ShardLayout& layout, const Device& device) {
  move_to_host(parameters);
  MemoryScope kind(MemoryKind::kParameter);
  const Tensor flat = Tensor::empty({layout.full_numel()},
                                    {parameters[0].tensor.dtype(), device});
  flat.flat_view(layout.numel, {layout.full_numel() - layout.numel}).zero();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor parameter = parameters[i].tensor;
    const Tensor place = flat.flat_view(layout.offsets[i], parameter.shape());
    place.copy_from(parameter);
    set_data(parameter, place);
  }
  return flat;
}

}  // namespace shardbook::zero
