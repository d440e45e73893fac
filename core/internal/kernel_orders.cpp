#include "core/internal/kernel_orders.h"

#include <algorithm>
#include <utility>

#include "core/context.h"
#include "core/internal/tensor_impl.h"
#include "core/kernels/elementwise.h"

namespace shardbook::internal {

namespace {

SharedKernelOrder kernel_order_of(const Tensor& tensor) {
  KernelOrders* orders = tensor.impl()->storage->known_kernel_orders();
  return orders == nullptr ? nullptr : orders->order();
}

void* address_as_it_lies(const Tensor& tensor) {
  auto* base = static_cast<std::byte*>(tensor.impl()->storage->data());
  // A released storage: Tensor::raw throws the error.
  if (base == nullptr) return tensor.raw();
  return base + tensor.impl()->offset *
                    static_cast<std::int64_t>(dtype_bytes(tensor.dtype()));
}

}  // namespace

void KernelOrders::settle(Storage& storage) {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_copies();
  if (order_ == nullptr) return;
  Storage plain(storage.device(), storage.bytes(), MemoryKind::kWorkspace);
  order_->to_plain(RankContext::current().kernels(storage.device()),
                   storage.data(), plain.data());
  storage.swap_memory(plain);
  order_ = nullptr;
}

void KernelOrders::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_copies();
  order_ = nullptr;
}

void KernelOrders::set_order(SharedKernelOrder order) {
  const std::lock_guard<std::mutex> lock(mutex_);
  order_ = std::move(order);
}

SharedKernelOrder KernelOrders::order() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return order_;
}

void KernelOrders::end_copies() {
  for (Copy& copy : copies_) {
    // The address may be asked for several times between two uses.
    if (copy.uses > 0) copy.is_used_often = copy.uses > 1;
    copy.uses = 0;
    copy.data = nullptr;
  }
}

std::shared_ptr<Storage> KernelOrders::find_or_make(
    const Storage& storage, std::int64_t offset, const SharedKernelOrder& order,
    std::size_t bytes, const std::function<void(void*)>& fill) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto copy =
      std::find_if(copies_.begin(), copies_.end(), [&](const Copy& candidate) {
        return candidate.offset == offset && candidate.order->equals(*order);
      });
  if (copy == copies_.end()) {
    copies_.push_back({order, offset, 0, false, nullptr});
    copy = std::prev(copies_.end());
  }
  copy->uses += 1;
  if (copy->data == nullptr && (copy->is_used_often || copy->uses > 1)) {
    copy->data = std::make_shared<Storage>(storage.device(),
                                           static_cast<std::int64_t>(bytes),
                                           MemoryKind::kWorkspace);
    fill(copy->data->data());
  }
  return copy->data;
}

void* CopiesOf::find_or_make(const SharedKernelOrder& order, std::size_t bytes,
                             const std::function<void(void*)>& fill) {
  Storage& storage = *tensor_.impl()->storage;
  if (!may_keep_kernel_order(storage.device())) return nullptr;
  std::shared_ptr<Storage> copy = storage.kernel_orders().find_or_make(
      storage, tensor_.impl()->offset, order, bytes, fill);
  if (copy == nullptr) return nullptr;
  kept_.push_back(copy);
  return copy->data();
}

void* address_to_read(const Tensor& tensor) {
  return kernel_order_of(tensor) == nullptr ? address_as_it_lies(tensor)
                                            : tensor.raw();
}

bool may_keep_kernel_order(const Device& device) {
  return device.type() == DeviceType::kCpu && device.capacity_bytes() == 0;
}

void set_kernel_order(const Tensor& tensor, SharedKernelOrder order) {
  tensor.impl()->storage->kernel_orders().set_order(std::move(order));
}

void add_elements(KernelContext& context, const Tensor& a, const Tensor& b,
                  const Tensor& result) {
  const SharedKernelOrder order = kernel_order_of(a);
  const SharedKernelOrder other = kernel_order_of(b);
  const bool as_they_lie = result.is_same(a) && order != nullptr &&
                           other != nullptr && order->equals(*other);
  const auto address = [as_they_lie](const Tensor& tensor) {
    return as_they_lie ? address_as_it_lies(tensor) : tensor.raw();
  };
  const kernels::Dims n = {a.numel()};
  kernels::binary(context, kernels::BinaryOp::kAdd, a.dtype(), n, address(a), n,
                  address(b), address(result));
}

}  // namespace shardbook::internal
