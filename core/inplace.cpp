#include "core/inplace.h"

#include "core/internal/op_scope.h"
#include "core/internal/tensor_impl.h"
#include "core/kernels/elementwise.h"

namespace shardbook {

using internal::bytes_of;
using internal::OpScope;

namespace {

void check(const char* op, const Tensor& target, const Tensor& value) {
  internal::check_same_kind(op, target, value);
  SB_CHECK(target.shape() == value.shape(), op, ": shapes ",
           shape_text(target.shape()), " and ", shape_text(value.shape()),
           " differ");
}

void scale(const char* name, const Tensor& target, const Tensor& source,
           double factor) {
  OpScope(name, static_cast<double>(target.numel()),
          bytes_of({&target, &source}), target)
      .run(kernels::scale, target.dtype(), target.numel(), factor, source.raw(),
           target.raw());
}

}  // namespace

void add_into(const Tensor& target, const Tensor& value, double factor) {
  check("add_into", target, value);
  if (target.numel() == 0) return;
  OpScope("add_into", 2.0 * static_cast<double>(target.numel()),
          bytes_of({&target, &target, &value}), target)
      .run(kernels::axpy, target.dtype(), target.numel(), factor, value.raw(),
           target.raw());
}

void scale_into(const Tensor& target, const Tensor& source, double factor) {
  check("scale_into", target, source);
  if (target.numel() == 0) return;
  if (factor == 1) {
    const bool is_same_array = target.shares_storage(source) &&
                               target.impl()->offset == source.impl()->offset;
    if (!is_same_array) target.copy_from(source);
    return;
  }
  scale("scale_into", target, source, factor);
}

void scale_in_place(const Tensor& target, double factor) {
  if (target.numel() > 0) scale("scale_in_place", target, target, factor);
}

}  // namespace shardbook
