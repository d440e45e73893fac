#include "core/kernels/channel_statistics.h"

#include <cmath>
#include <vector>

#include "core/kernels/elementwise.h"

namespace shardbook::kernels::cpu {

void channel_moments(KernelContext& context, DType dtype,
                     const ChannelShape& shape, const void* x, double* sums,
                     double* squares) {
  cpu::channel_sums(context, dtype, shape, x, sums);
  std::vector<double> mean(sums, sums + shape.channels);
  for (double& each : mean) {
    each /= static_cast<double>(shape.batch * shape.inner);
  }
  cpu::channel_centered_squares(context, dtype, shape, x, mean.data(), squares);
}

void channel_divide(KernelContext&, std::int64_t channels, const double* count,
                    double* sums) {
  const double values = count[0];
  for (std::int64_t c = 0; c < channels; ++c) sums[c] /= values;
}

void channel_shift_squares(KernelContext&, std::int64_t channels,
                           const double* local, const double* mean,
                           double* squares) {
  const double local_count = local[channels];
  for (std::int64_t c = 0; c < channels; ++c) {
    const double shift = local[c] / local_count - mean[c];
    squares[c] += local_count * shift * shift;
  }
}

void channel_rstd(KernelContext&, std::int64_t channels, const double* variance,
                  double eps, double* rstd) {
  for (std::int64_t c = 0; c < channels; ++c) {
    rstd[c] = 1.0 / std::sqrt(variance[c] + eps);
  }
}

namespace {

// The order of operations decides the bits.
template <typename T>
void blend(T* running, const double* now, std::int64_t channels, double keep,
           double share) {
  for (std::int64_t c = 0; c < channels; ++c) {
    running[c] =
        static_cast<T>(keep * static_cast<double>(running[c]) + share * now[c]);
  }
}

}  // namespace

void channel_blend(KernelContext& context, DType dtype, std::int64_t channels,
                   double keep, double share, const double* now,
                   void* running) {
  if (dtype == DType::kF64) {
    blend(static_cast<double*>(running), now, channels, keep, share);
  } else if (dtype == DType::kF32) {
    blend(static_cast<float*>(running), now, channels, keep, share);
  } else {
    std::vector<double> values(static_cast<std::size_t>(channels));
    cpu::cast(context, dtype, running, DType::kF64, values.data(), channels);
    blend(values.data(), now, channels, keep, share);
    cpu::cast(context, DType::kF64, values.data(), dtype, running, channels);
  }
}

}  // namespace shardbook::kernels::cpu
