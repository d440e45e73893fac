// Arithmetic on shapes, without tensors.

#include <fmt/format.h>

#include "core/check.h"
#include "core/tensor.h"

namespace shardbook {

std::int64_t shape_numel(const Shape& shape) {
  std::int64_t numel = 1;
  for (std::int64_t size : shape) {
    SB_CHECK(size >= 0, "shape ", shape_text(shape), " has a negative size");
    SB_CHECK(!__builtin_mul_overflow(numel, size, &numel), "shape ",
             shape_text(shape), " has more elements than can be counted");
  }
  return numel;
}

std::string shape_text(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace shardbook
