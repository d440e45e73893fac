#pragma once

// Arrays in a kernel's own order.
//
// oneDNN's convolutions read weights in blocks that fit the registers.
// Reordering a weight costs as much as the work on several images. So a kernel
// asks its caller to keep the reordered copy of a weight that it meets several
// times, and may leave a weight's gradient in its own order until the gradient
// is read.

#include <cstddef>
#include <functional>
#include <memory>

#include "core/kernels/kernel_context.h"

namespace shardbook {

/// How a kernel arranges the elements of one array.
class KernelOrder {
 public:
  virtual ~KernelOrder() = default;
  /// True when arrays in both orders may be added element by element.
  virtual bool equals(const KernelOrder& other) const = 0;
  /// Writes `ordered` to `plain` in row-major order; they must not overlap.
  virtual void to_plain(KernelContext& context, const void* ordered,
                        void* plain) const = 0;
};
using SharedKernelOrder = std::shared_ptr<const KernelOrder>;

/// Keeps copies of one array in kernels' orders while the array stays the same.
class OrderedCopies {
 public:
  virtual ~OrderedCopies() = default;
  /// The copy in `order`, of `bytes` bytes; `fill` writes it when it is new.
  /// Null when the copy is not worth keeping: the kernel then uses scratch.
  /// The address is valid for the lifetime of this object.
  virtual void* find_or_make(const SharedKernelOrder& order, std::size_t bytes,
                             const std::function<void(void*)>& fill) = 0;
};

}  // namespace shardbook
