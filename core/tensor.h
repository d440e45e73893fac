#pragma once

// Tensors.
//
// A `Tensor` is a cheap handle to an array on one device: copying the handle
// shares the array. Arrays are contiguous and row-major. A slice along dim 0
// and a reshape are views of the same storage; other layouts copy.
//
//   Tensor w = Tensor::from_values<float>({1, 2, 3, 4}, {2, 2});
//   w.set_requires_grad();
//   Tensor loss = sum(matmul(w, w));           // core/ops.h
//   loss.backward();
//   w.grad().to_vector<float>();
//
// A tensor also carries its own gradient. Handles of one tensor may be read
// from several threads; writing needs the caller's own ordering.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"

namespace shardbook {

using Shape = std::vector<std::int64_t>;
std::int64_t shape_numel(const Shape& shape);
/// "[2, 3]".
std::string shape_text(const Shape& shape);

namespace autograd {
class Node;
struct Meta;
}  // namespace autograd

struct TensorOptions {
  DType dtype = DType::kF32;
  Device device{};  ///< undefined: the device of the current RankContext
};

class Tensor;
using Tensors = std::vector<Tensor>;
/// Called with the parameter whose gradient has just been accumulated.
using AccumulateHook = std::function<void(Tensor& parameter)>;
/// Called with the gradient of a tensor before it flows on; may replace it.
using GradHook = std::function<Tensor(const Tensor& grad)>;

/// Operations return new tensors, so a result that nobody keeps is a mistake: to
/// change x, write scale_into(x, x, 2) (core/inplace.h) instead of scale(x, 2).
class [[nodiscard]] Tensor {
 public:
  /// An undefined tensor: no shape, no data.
  Tensor() = default;

  // --- Making tensors (booked under the current MemoryScope) ---------------

  /// Memory is not initialised.
  static Tensor empty(const Shape& shape, const TensorOptions& options = {});
  static Tensor zeros(const Shape& shape, const TensorOptions& options = {});
  static Tensor full(const Shape& shape, double value,
                     const TensorOptions& options = {});
  /// 0, 1, 2, ... n-1.
  static Tensor arange(std::int64_t n, const TensorOptions& options = {});
  /// T is double, float, int64_t or int32_t; the dtype follows from T.
  template <typename T>
  static Tensor from_values(const std::vector<T>& values, const Shape& shape,
                            const Device& device = Device());
  /// An array of the same shape, dtype and device; not initialised.
  Tensor empty_like() const { return empty(shape(), options()); }
  Tensor zeros_like() const { return zeros(shape(), options()); }

  // --- What it is -----------------------------------------------------------

  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const;
  std::int64_t ndim() const {
    return static_cast<std::int64_t>(shape().size());
  }
  /// Size of one dim; negative dims count from the end.
  std::int64_t size(std::int64_t dim) const;
  std::int64_t numel() const;
  DType dtype() const;
  const Device& device() const;
  bool is_meta() const { return device().is_meta(); }
  TensorOptions options() const { return {dtype(), device()}; }
  /// numel times the size of one element.
  std::int64_t bytes() const;
  /// Same tensor object (not merely equal or sharing memory).
  bool is_same(const Tensor& other) const { return impl_ == other.impl_; }
  /// Both lie in one allocation.
  bool shares_storage(const Tensor& other) const;
  /// An identity that is stable while the tensor lives.
  const void* id() const { return impl_.get(); }

  // --- Reading and writing --------------------------------------------------

  /// Address of the first element; null on meta and for empty tensors. To read
  /// or write after another operation has used the tensor, ask again:
  /// convolutions keep copies of a weight until its address is requested.
  void* raw() const;
  /// The same as T*; throws when T is not the dtype's C++ type.
  template <typename T>
  T* data() const;
  /// All elements, converted to T.
  template <typename T>
  std::vector<T> to_vector() const;
  /// The only element, as double; 0 on meta devices, which have no values.
  double item() const;
  /// Copies `source` (same shape; any dtype, any device) into this one.
  /// Not recorded for backward.
  void copy_from(const Tensor& source) const;
  void fill(double value) const;
  void zero() const { fill(0); }
  /// A copy with storage of its own. Not recorded for backward.
  Tensor clone() const;
  /// A view, not recorded for backward: rows begin..end-1 of dim 0.
  Tensor rows_view(std::int64_t begin, std::int64_t end) const;
  /// A view, not recorded for backward: `numel(shape)` elements that start
  /// `offset` elements after this tensor's first.
  Tensor flat_view(std::int64_t offset, const Shape& shape) const;

  // --- Gradients (core/autograd.h) ------------------------------------------

  bool requires_grad() const;
  /// For leaves only.
  const Tensor& set_requires_grad(bool on = true) const;
  bool is_leaf() const;
  /// Undefined until a backward has reached this tensor.
  Tensor grad() const;
  void set_grad(const Tensor& grad) const;
  void clear_grad() const;
  /// The same array, cut off from the graph.
  Tensor detach() const;
  /// Runs after a leaf's gradient was accumulated; returns a key for removal.
  int add_accumulate_hook(AccumulateHook hook) const;
  void remove_accumulate_hook(int key) const;
  /// Runs when this result's gradient is complete, before it flows on. Not for
  /// leaves.
  void add_grad_hook(GradHook hook) const;
  /// Gradients of all leaves below this scalar; see autograd::backward.
  void backward() const;

  struct Impl;
  Impl* impl() const { return impl_.get(); }
  explicit Tensor(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  const std::shared_ptr<Impl>& impl_ptr() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Largest |a - b| over all elements, as double.
double max_abs_difference(const Tensor& a, const Tensor& b);
/// Same dtype, shape and bits.
bool bitwise_equal(const Tensor& a, const Tensor& b);

}  // namespace shardbook
