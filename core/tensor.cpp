#include "core/tensor.h"

#include <cstring>
#include <numeric>

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/internal/kernel_orders.h"
#include "core/internal/op_scope.h"
#include "core/internal/tensor_impl.h"
#include "core/internal/transfers.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/reduce.h"
#include "core/marks.h"
#include "core/tensor_storage.h"

namespace shardbook {
namespace {

template <typename T>
constexpr DType kDTypeOf = DType::kF64;
template <>
constexpr DType kDTypeOf<float> = DType::kF32;
template <>
constexpr DType kDTypeOf<std::int64_t> = DType::kI64;
template <>
constexpr DType kDTypeOf<std::int32_t> = DType::kI32;

KernelContext& kernels_for(const Device& device) {
  return RankContext::current().kernels(device);
}

Tensor make_tensor(std::shared_ptr<Storage> storage, std::int64_t offset,
                   const Shape& shape, DType dtype) {
  auto impl = std::make_shared<Tensor::Impl>();
  impl->storage = std::move(storage);
  impl->offset = offset;
  impl->shape = shape;
  impl->numel = shape_numel(shape);
  impl->dtype = dtype;
  return Tensor(std::move(impl));
}

void check_defined(const Tensor& tensor, const char* what) {
  SB_CHECK(tensor.defined(), what, ": the tensor is undefined");
}

}  // namespace

// --- Making tensors ----------------------------------------------------------

Tensor Tensor::empty(const Shape& shape, const TensorOptions& options) {
  RankContext& context = RankContext::current();
  const Device& device =
      options.device.defined() ? options.device : context.device;
  const auto element = static_cast<std::int64_t>(dtype_bytes(options.dtype));
  std::int64_t bytes = 0;
  SB_CHECK(!__builtin_mul_overflow(shape_numel(shape), element, &bytes),
           "empty: shape ", shape_text(shape), " in ",
           dtype_name(options.dtype), " has more bytes than can be counted");
  auto storage = std::make_shared<Storage>(device, bytes, context.memory_kind);
  return make_tensor(std::move(storage), 0, shape, options.dtype);
}

Tensor Tensor::zeros(const Shape& shape, const TensorOptions& options) {
  Tensor tensor = empty(shape, options);
  if (tensor.numel() == 0) return tensor;
  const internal::OpScope scope("fill", 0, internal::bytes_of({&tensor}),
                                tensor);
  if (scope.runs()) internal::zero_bytes(tensor);
  return tensor;
}

Tensor Tensor::full(const Shape& shape, double value,
                    const TensorOptions& options) {
  Tensor tensor = empty(shape, options);
  tensor.fill(value);
  return tensor;
}

Tensor Tensor::arange(std::int64_t n, const TensorOptions& options) {
  std::vector<double> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), 0.0);
  Tensor result = empty({n}, options);
  result.copy_from(from_values<double>(values, {n}, Device::cpu()));
  return result;
}

template <typename T>
Tensor Tensor::from_values(const std::vector<T>& values, const Shape& shape,
                           const Device& device) {
  SB_CHECK(static_cast<std::int64_t>(values.size()) == shape_numel(shape),
           "from_values: ", values.size(), " values do not fill shape ",
           shape_text(shape));
  Tensor tensor = empty(shape, {kDTypeOf<T>, device});
  if (!tensor.is_meta() && !values.empty()) {
    internal::write_from_host(tensor, values.data());
  }
  return tensor;
}
template Tensor Tensor::from_values(const std::vector<double>&, const Shape&,
                                    const Device&);
template Tensor Tensor::from_values(const std::vector<float>&, const Shape&,
                                    const Device&);
template Tensor Tensor::from_values(const std::vector<std::int64_t>&,
                                    const Shape&, const Device&);
template Tensor Tensor::from_values(const std::vector<std::int32_t>&,
                                    const Shape&, const Device&);

// --- What it is --------------------------------------------------------------

const Shape& Tensor::shape() const {
  check_defined(*this, "shape");
  return impl_->shape;
}

std::int64_t Tensor::size(std::int64_t dim) const {
  const std::int64_t n = ndim();
  SB_CHECK(dim >= -n && dim < n, "size: dim ", dim, " of a tensor of shape ",
           shape_text(shape()), "; dims are ", -n, " to ", n - 1);
  return shape()[static_cast<std::size_t>(dim < 0 ? dim + n : dim)];
}

std::int64_t Tensor::numel() const {
  check_defined(*this, "numel");
  return impl_->numel;
}

DType Tensor::dtype() const {
  check_defined(*this, "dtype");
  return impl_->dtype;
}

const Device& Tensor::device() const {
  check_defined(*this, "device");
  return impl_->storage->device();
}

std::int64_t Tensor::bytes() const {
  return numel() * static_cast<std::int64_t>(dtype_bytes(dtype()));
}

bool Tensor::shares_storage(const Tensor& other) const {
  return defined() && other.defined() && impl_->storage == other.impl_->storage;
}

// --- Reading and writing -----------------------------------------------------

void* Tensor::raw() const {
  check_defined(*this, "raw");
  if (auto* orders = impl_->storage->known_kernel_orders()) {
    orders->settle(*impl_->storage);
  }
  auto* base = static_cast<std::byte*>(impl_->storage->data());
  if (base == nullptr) {
    // A sharded parameter outside its unit's forward and backward
    SB_CHECK(numel() == 0 || is_meta(), "a tensor of shape ",
             shape_text(shape()),
             " whose storage was released is read; a "
             "sharded parameter has values only while its unit runs");
    return nullptr;
  }
  return base + impl_->offset * static_cast<std::int64_t>(dtype_bytes(dtype()));
}

template <typename T>
T* Tensor::data() const {
  SB_CHECK(dtype() == kDTypeOf<T>, "data: the tensor is ", dtype_name(dtype()),
           ", asked for as ", dtype_name(kDTypeOf<T>));
  return static_cast<T*>(raw());
}
template double* Tensor::data() const;
template float* Tensor::data() const;
template std::int64_t* Tensor::data() const;
template std::int32_t* Tensor::data() const;

template <typename T>
std::vector<T> Tensor::to_vector() const {
  SB_CHECK(!is_meta(), "to_vector: a tensor on ", device().name(),
           " has a shape and no values");
  std::vector<T> values(static_cast<std::size_t>(numel()));
  const Tensor readable = internal::on_host(*this);
  kernels::cast(kernels_for(readable.device()), dtype(), readable.raw(),
                kDTypeOf<T>, values.data(), numel());
  return values;
}
template std::vector<double> Tensor::to_vector() const;
template std::vector<float> Tensor::to_vector() const;
template std::vector<std::int64_t> Tensor::to_vector() const;
template std::vector<std::int32_t> Tensor::to_vector() const;

double Tensor::item() const {
  SB_CHECK(numel() == 1, "item: a tensor of shape ", shape_text(shape()),
           " is not a single value");
  for (const auto& observer : RankContext::current().observers()) {
    observer->on_host_read(device());
  }
  return is_meta() ? 0 : to_vector<double>()[0];
}

void Tensor::copy_from(const Tensor& source) const {
  SB_CHECK(shape() == source.shape(), "copy_from: shape ",
           shape_text(source.shape()), " does not fit into ",
           shape_text(shape()));
  if (numel() == 0) return;
  const bool is_transfer = device() != source.device();
  const internal::OpScope scope(is_transfer                 ? "transfer"
                                : dtype() == source.dtype() ? "copy"
                                                            : "cast",
                                0, internal::bytes_of({this, &source}), *this,
                                {}, is_transfer ? source.device() : Device());
  if (is_meta() || source.is_meta()) return;
  internal::copy_elements(*this, source);
}

void Tensor::fill(double value) const {
  if (numel() == 0) return;
  const internal::OpScope scope("fill", 0, internal::bytes_of({this}), *this);
  if (is_meta()) return;
  kernels::fill(kernels_for(device()), dtype(), numel(), raw(), value);
}

Tensor Tensor::clone() const {
  Tensor copy = empty_like();
  copy.copy_from(*this);
  return copy;
}

Tensor Tensor::rows_view(std::int64_t begin, std::int64_t end) const {
  SB_CHECK(ndim() >= 1 && 0 <= begin && begin <= end && end <= size(0),
           "rows_view: rows ", begin, " to ", end, " of shape ",
           shape_text(shape()));
  Shape rows = shape();
  rows[0] = end - begin;
  const std::int64_t row = size(0) == 0 ? 0 : numel() / size(0);
  return internal::make_view(*this, begin * row, rows);
}

Tensor Tensor::flat_view(std::int64_t offset, const Shape& shape) const {
  SB_CHECK(offset >= 0 && offset + shape_numel(shape) <= numel(),
           "flat_view: ", shape_numel(shape), " elements at ", offset,
           " of a tensor of ", numel());
  return internal::make_view(*this, offset, shape);
}

// --- Gradients ---------------------------------------------------------------

bool Tensor::requires_grad() const {
  return defined() && impl_->meta != nullptr &&
         (impl_->meta->requires_grad || impl_->meta->grad_fn != nullptr);
}

const Tensor& Tensor::set_requires_grad(bool on) const {
  SB_CHECK(is_leaf(),
           "set_requires_grad: only leaves can be told; this tensor "
           "is the result of an operation");
  SB_CHECK(!on || is_floating(dtype()),
           "set_requires_grad: ", dtype_name(dtype()), " has no gradient");
  impl_->grad_meta().requires_grad = on;
  return *this;
}

bool Tensor::is_leaf() const {
  check_defined(*this, "is_leaf");
  return impl_->meta == nullptr || impl_->meta->grad_fn == nullptr;
}

Tensor Tensor::grad() const {
  check_defined(*this, "grad");
  return impl_->meta == nullptr ? Tensor() : impl_->meta->grad;
}

void Tensor::set_grad(const Tensor& grad) const {
  SB_CHECK(!grad.defined() || grad.shape() == shape(), "set_grad: shape ",
           shape_text(grad.shape()), " for a tensor of shape ",
           shape_text(shape()));
  impl_->grad_meta().grad = grad;
}

void Tensor::clear_grad() const {
  if (impl_->meta != nullptr) impl_->meta->grad = Tensor();
}

Tensor Tensor::detach() const {
  check_defined(*this, "detach");
  return internal::make_view(*this, 0, shape());
}

int Tensor::add_accumulate_hook(AccumulateHook hook) const {
  SB_CHECK(is_leaf(), "add_accumulate_hook: only leaves accumulate");
  autograd::Meta& meta = impl_->grad_meta();
  meta.accumulate_hooks.emplace_back(meta.next_hook_key, std::move(hook));
  return meta.next_hook_key++;
}

void Tensor::remove_accumulate_hook(int key) const {
  std::erase_if(impl_->grad_meta().accumulate_hooks,
                [key](const auto& hook) { return hook.first == key; });
}

void Tensor::backward() const { autograd::backward({*this}); }

// --- Storage -----------------------------------------------------------------

void set_data(const Tensor& tensor, const Tensor& source) {
  SB_CHECK(source.numel() == tensor.numel() && source.dtype() == tensor.dtype(),
           "set_data: ", dtype_name(source.dtype()), shape_text(source.shape()),
           " cannot stand for ", dtype_name(tensor.dtype()),
           shape_text(tensor.shape()));
  tensor.impl()->storage = source.impl()->storage;
  tensor.impl()->offset = source.impl()->offset;
}

void release_storage(const Tensor& tensor) {
  tensor.impl()->storage->resize(0);
}

void restore_storage(const Tensor& tensor) {
  SB_CHECK(tensor.impl()->offset == 0,
           "restore_storage: call it on the tensor that covers the storage");
  tensor.impl()->storage->resize(tensor.bytes());
}

void set_grad_buffer(const Tensor& tensor, const Tensor& buffer) {
  SB_CHECK(!buffer.defined() || buffer.shape() == tensor.shape(),
           "set_grad_buffer: shape ", shape_text(buffer.shape()),
           " for a tensor of shape ", shape_text(tensor.shape()));
  tensor.impl()->grad_meta().grad_buffer = buffer;
}

MemoryKind memory_kind_of(const Tensor& tensor) {
  return tensor.impl()->storage->kind();
}

const Tensor& set_memory_kind(const Tensor& tensor, MemoryKind kind) {
  tensor.impl()->storage->set_kind(kind);
  return tensor;
}

void set_stands_for_parameter(const Tensor& tensor) {
  SB_CHECK(tensor.defined(),
           "set_stands_for_parameter: the tensor is undefined");
  tensor.impl()->grad_meta().stands_for_parameter = true;
}

bool stands_for_parameter(const Tensor& tensor) {
  return tensor.defined() && tensor.impl()->meta != nullptr &&
         tensor.impl()->meta->stands_for_parameter;
}

// --- Helpers -----------------------------------------------------------------

namespace internal {

Tensor make_view(const Tensor& base, std::int64_t offset, const Shape& shape) {
  Tensor view = make_tensor(base.impl()->storage, base.impl()->offset + offset,
                            shape, base.dtype());
  view.impl()->mark = base.impl()->mark;
  return view;
}

void pass_mark(const char* op, const Tensor& result, const Tensor& a,
               const Tensor& b) {
  const int mark_a = mark_of(a), mark_b = b.defined() ? mark_of(b) : 0;
  SB_CHECK(mark_a == 0 || mark_b == 0 || mark_a == mark_b, op,
           ": operands are laid out in two ways, marked ", mark_a, " and ",
           mark_b, "; bring one of them into the layout of the other");
  set_mark(result, mark_a == 0 ? mark_b : mark_a);
}

bool is_sole_owner(const Tensor& tensor) {
  return tensor.impl_ptr().use_count() == 1 &&
         tensor.impl()->storage.use_count() == 1;
}

}  // namespace internal

const Tensor& set_mark(const Tensor& tensor, int mark) {
  tensor.impl()->mark = mark;
  return tensor;
}

int mark_of(const Tensor& tensor) { return tensor.impl()->mark; }

double max_abs_difference(const Tensor& a, const Tensor& b) {
  SB_CHECK(a.shape() == b.shape(), "max_abs_difference: shapes ",
           shape_text(a.shape()), " and ", shape_text(b.shape()));
  const bool on_one_side = a.device() == b.device() ||
                           (!a.device().is_cuda() && !b.device().is_cuda());
  if (!on_one_side) {
    return max_abs_difference(internal::on_host(a), internal::on_host(b));
  }
  if (a.dtype() == b.dtype()) {
    return kernels::max_abs_difference(kernels_for(a.device()), a.dtype(),
                                       a.numel(), a.raw(), b.raw());
  }
  const std::vector<double> x = a.to_vector<double>();
  const std::vector<double> y = b.to_vector<double>();
  return kernels::max_abs_difference(kernels_for(RankContext::current().host()),
                                     DType::kF64, a.numel(), x.data(),
                                     y.data());
}

bool bitwise_equal(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  if (a.numel() == 0) return true;
  const Tensor x = internal::on_host(a), y = internal::on_host(b);
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.bytes())) ==
         0;
}

}  // namespace shardbook
