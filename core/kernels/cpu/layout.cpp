#include "core/kernels/layout.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/kernels/cpu/transpose_block.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cpu {

namespace {

// Calls fn with an unsigned integer (or float) as large as an element.
template <typename Fn>
void dispatch_size(DType dtype, const Fn& fn) {
  switch (dtype_bytes(dtype)) {
    case 8:
      return fn(double());
    case 4:
      return fn(float());
    default:
      return fn(std::uint16_t());
  }
}

template <typename T>
void copy_row(const T* src, std::int64_t src_step, T* dst,
              std::int64_t dst_step, std::int64_t n) {
  if (src_step == 1 && dst_step == 1) {
    // Short rows are cheaper without a call.
    if (n * sizeof(T) >= 256) {
      std::memcpy(dst, src, n * sizeof(T));
    } else {
      for (std::int64_t i = 0; i < n; ++i) dst[i] = src[i];
    }
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) dst[i * dst_step] = src[i * src_step];
}

// dst runs along its last loop, src along loop `along`: strips of rows are
// transposed from cache to cache.
template <typename T>
void copy_transposed(const Loops& loops, std::size_t along, const T* src,
                     T* dst) {
  const std::size_t last = loops.sizes.size() - 1;
  const std::int64_t rows = loops.sizes[last], x_ld = loops.a[last];
  const std::int64_t cols = loops.sizes[along], out_ld = loops.b[along];
  constexpr std::int64_t kStrip = 64;
  const std::int64_t strips = (rows + kStrip - 1) / kStrip;
  std::int64_t count = strips;
  for (std::size_t d = 0; d < last; ++d) {
    if (d != along) count *= loops.sizes[d];
  }
  const std::int64_t work = std::min(rows, kStrip) * cols;
  for_rows(count, work, [&](std::int64_t i) {
    const std::int64_t row = i % strips * kStrip;
    std::int64_t rest = i / strips, s = row * x_ld, t = row;
    for (std::size_t d = last; d-- > 0;) {
      if (d == along) continue;
      s += rest % loops.sizes[d] * loops.a[d];
      t += rest % loops.sizes[d] * loops.b[d];
      rest /= loops.sizes[d];
    }
    transpose_into(src + s, x_ld, std::min(kStrip, rows - row), cols, dst + t,
                   out_ld);
  });
}

template <typename T>
void copy_loops(const Loops& loops, const T* src, T* dst) {
  if (loops.sizes.empty()) {
    *dst = *src;
    return;
  }
  const std::size_t last = loops.sizes.size() - 1;
  if (loops.b[last] == 1 && loops.a[last] != 1) {
    for (std::size_t along = 0; along < last; ++along) {
      if (loops.a[along] == 1) return copy_transposed(loops, along, src, dst);
    }
  }
  for_outer(loops, [&](std::int64_t, std::int64_t s, std::int64_t t) {
    copy_row(src + s, loops.a[last], dst + t, loops.b[last], loops.sizes[last]);
  });
}

}  // namespace

void copy_strided(KernelContext&, DType dtype, const Dims& shape,
                  const void* src, const Dims& src_strides, void* dst,
                  const Dims& dst_strides) {
  const Loops loops = plan_copy(shape, src_strides, dst_strides);
  for (const std::int64_t size : shape) {
    if (size == 0) return;
  }
  dispatch_size(dtype, [&](auto zero) {
    using T = decltype(zero);
    copy_loops(loops, static_cast<const T*>(src), static_cast<T*>(dst));
  });
}

void permute(KernelContext& context, DType dtype, const Dims& shape,
             const Dims& order, const void* src, void* dst) {
  const PermutedView view = plan_permute(shape, order);
  copy_strided(context, dtype, view.shape, src, view.strides, dst,
               contiguous_strides(view.shape));
}

}  // namespace shardbook::kernels::cpu
