#pragma once

// The kernels' orders of one storage. Read by core/*.cpp only.
//
// The storage of a weight keeps copies of it in the orders of convolutions,
// until the weight may be written. The storage of a weight's gradient may lie
// in such an order itself, until the gradient may be read. An operation that
// asks for a tensor's address (Tensor::raw) may do both, so Tensor::raw settles
// the storage first; convolutions do not call it.
//
// Devices with a capacity do neither: their memory belongs to the program. Nor
// do GPUs, whose convolutions read row-major weights.

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "core/device.h"
#include "core/kernels/kernel_order.h"
#include "core/tensor.h"

namespace shardbook::internal {

/// The orders of one storage. Safe to use from several threads.
class KernelOrders {
 public:
  /// Makes the values row-major and drops copies: from now on the storage may
  /// be read or written.
  void settle(Storage& storage);
  /// Drops the order and all copies: the storage's contents are lost.
  void forget();

  /// Records that the values lie in `order`; null is row-major.
  void set_order(SharedKernelOrder order);
  SharedKernelOrder order() const;

  /// A copy of the array that begins `offset` elements into the storage, as
  /// OrderedCopies::find_or_make gives it. It is kept from the second use on,
  /// or from the first if the previous values of the array were used more than
  /// once.
  std::shared_ptr<Storage> find_or_make(const Storage& storage,
                                        std::int64_t offset,
                                        const SharedKernelOrder& order,
                                        std::size_t bytes,
                                        const std::function<void(void*)>& fill);

 private:
  struct Copy {
    SharedKernelOrder order;
    std::int64_t offset = 0;
    int uses = 0;  ///< since the array was last written
    bool is_used_often = false;
    std::shared_ptr<Storage> data;
  };
  void end_copies();

  mutable std::mutex mutex_;
  SharedKernelOrder order_;
  std::vector<Copy> copies_;
};

/// Copies of one tensor, for the duration of an operation.
class CopiesOf : public OrderedCopies {
 public:
  explicit CopiesOf(const Tensor& tensor) : tensor_(tensor) {}
  void* find_or_make(const SharedKernelOrder& order, std::size_t bytes,
                     const std::function<void(void*)>& fill) override;

 private:
  const Tensor& tensor_;
  std::vector<std::shared_ptr<Storage>> kept_;
};

/// Address of row-major elements, for an operation that only reads: copies in
/// kernels' orders stay.
void* address_to_read(const Tensor& tensor);

/// True where gradients of this device may stay in a kernel's order.
bool may_keep_kernel_order(const Device& device);
/// Records that `tensor`, which fills its storage, lies in `order`.
void set_kernel_order(const Tensor& tensor, SharedKernelOrder order);
/// Writes a + b to `result`. Gradients of one weight add up in the order of its
/// kernel: where both lie in one order and `result` is `a`, they stay in it.
void add_elements(KernelContext& context, const Tensor& a, const Tensor& b,
                  const Tensor& result);

}  // namespace shardbook::internal
