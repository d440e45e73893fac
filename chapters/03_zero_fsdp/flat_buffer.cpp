#include "chapters/03_zero_fsdp/flat_buffer.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {
namespace {

std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Places of the parameters in the flat buffer, in order of memory.
std::vector<std::size_t> memory_order(std::size_t count, int ranks,
                                      bool round_robin) {
  const auto stride =
      round_robin ? static_cast<std::size_t>(ranks) : std::size_t{1};
  std::vector<std::size_t> order;
  for (std::size_t first = 0; first < stride; ++first) {
    for (std::size_t i = first; i < count; i += stride) order.push_back(i);
  }
  return order;
}

}  // namespace

FlatLayout flat_layout(const std::vector<std::int64_t>& numels, int ranks,
                       std::int64_t alignment, bool round_robin) {
  SB_CHECK(alignment >= 1, "zero: alignment ", alignment,
           "; give at least 1 element");
  FlatLayout layout;
  layout.ranks = ranks;
  layout.numels = numels;
  layout.offsets.resize(numels.size());
  for (const std::size_t i : memory_order(numels.size(), ranks, round_robin)) {
    layout.offsets[i] = layout.numel;
    layout.numel += numels[i];
  }
  layout.padded = rounded_up(layout.numel, alignment * ranks);
  return layout;
}

std::vector<OwnedPart> FlatLayout::parts(int parameter) const {
  const auto i = static_cast<std::size_t>(parameter);
  const std::int64_t begin = offsets[i], end = offsets[i] + numels[i];
  std::vector<OwnedPart> found;
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t owner = at / shard();
    const std::int64_t stop = std::min(end, (owner + 1) * shard());
    found.push_back({parameter, static_cast<int>(owner), at - begin,
                     at - owner * shard(), stop - at});
    at = stop;
  }
  return found;
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
               const FlatLayout& layout, const Device& device) {
  move_to_host(parameters);
  MemoryScope kind(MemoryKind::kParameter);
  const Tensor flat =
      Tensor::empty({layout.padded}, {parameters[0].tensor.dtype(), device});
  flat.flat_view(layout.numel, {layout.padded - layout.numel}).zero();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor parameter = parameters[i].tensor;
    const Tensor place = flat.flat_view(layout.offsets[i], parameter.shape());
    place.copy_from(parameter);
    set_data(parameter, place);
  }
  return flat;
}

}  // namespace shardbook::zero
