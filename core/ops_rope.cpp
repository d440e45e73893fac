// Rotary positions.

#include <cmath>
#include <cstddef>
#include <numbers>
#include <type_traits>

#include "core/check.h"
#include "core/internal/op_scope.h"
#include "core/internal/transfers.h"
#include "core/kernels/turn_heads.h"
#include "core/ops.h"
#include "core/rope.h"

namespace shardbook {

using internal::bytes_of;
using internal::count;
using internal::OpScope;

namespace {

void check_scaling(const RopeScaling& scaling) {
  SB_CHECK(scaling.kind == RopeScaling::Kind::kNone || scaling.factor > 0,
           "rope: positions are divided by a factor of ", scaling.factor,
           "; give a positive one");
  if (scaling.kind != RopeScaling::Kind::kLlama3) return;
  SB_CHECK(scaling.original_positions > 0, "rope: llama3 scales from ",
           scaling.original_positions,
           " original positions; give those that the model was trained on");
  SB_CHECK(0 < scaling.low_freq_factor &&
               scaling.low_freq_factor < scaling.high_freq_factor,
           "rope: llama3's low_freq_factor ", scaling.low_freq_factor,
           " is not between 0 and high_freq_factor ", scaling.high_freq_factor);
}

double scaled(double frequency, const RopeScaling& scaling) {
  const double slow = frequency / scaling.factor;
  if (scaling.kind == RopeScaling::Kind::kNone) return frequency;
  if (scaling.kind == RopeScaling::Kind::kLinear) return slow;
  // How often the angle turns full circle over the original positions
  const double turns = static_cast<double>(scaling.original_positions) *
                       frequency / (2 * std::numbers::pi);
  const double low = scaling.low_freq_factor, high = scaling.high_freq_factor;
  if (turns < low) return slow;
  if (turns > high) return frequency;
  const double share = (turns - low) / (high - low);
  return (1 - share) * slow + share * frequency;
}

/// Cosines and sines of all positions, computed in S on the host.
template <typename S>
Tensor wide_table(const std::vector<std::int64_t>& positions,
                  const std::vector<double>& frequencies,
                  const Device& device) {
  const std::size_t half = frequencies.size();
  const Tensor table = Tensor::empty(
      {static_cast<std::int64_t>(positions.size()),
       static_cast<std::int64_t>(2 * half)},
      {std::is_same_v<S, double> ? DType::kF64 : DType::kF32, device});
  if (table.is_meta() || positions.empty()) return table;
  std::vector<S> values(positions.size() * 2 * half);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    for (std::size_t i = 0; i < half; ++i) {
      const S angle =
          static_cast<S>(positions[t]) * static_cast<S>(frequencies[i]);
      values[t * 2 * half + i] = std::cos(angle);
      values[t * 2 * half + half + i] = std::sin(angle);
    }
  }
  internal::write_from_host(table, values.data());
  return table;
}

Tensor turn(const Tensor& x, const Tensor& table,
            const kernels::RopeArgs& args) {
  Tensor y = x.empty_like();
  const auto turned = static_cast<double>(args.rows * args.heads);
  OpScope("rope", 3 * turned * static_cast<double>(args.head_dim),
          bytes_of({&x, &table, &y}), x)
      .run(kernels::rope, x.dtype(), args, x.raw(), table.raw(), y.raw());
  return y;
}

}  // namespace

std::vector<double> rope_frequencies(std::int64_t head_dim, double theta,
                                     const RopeScaling& scaling) {
  SB_CHECK(head_dim > 0 && head_dim % 2 == 0, "rope: a head of ", head_dim,
           " columns has no two halves; give an even number");
  SB_CHECK(theta > 0, "rope: theta is ", theta, "; give a positive number");
  check_scaling(scaling);
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    const double exponent =
        static_cast<double>(i) / static_cast<double>(head_dim);
    frequencies.push_back(scaled(std::pow(theta, -exponent), scaling));
  }
  return frequencies;
}

Tensor rope_table(const std::vector<std::int64_t>& positions,
                  std::int64_t head_dim, double theta,
                  const RopeScaling& scaling, const TensorOptions& options) {
  const std::vector<double> frequencies =
      rope_frequencies(head_dim, theta, scaling);
  const auto wide =
      options.dtype == DType::kF64 ? wide_table<double> : wide_table<float>;
  return to_dtype(wide(positions, frequencies, options.device), options.dtype);
}

Tensor rope(const Tensor& x, const Tensor& table, std::int64_t heads,
            std::int64_t head_dim) {
  internal::check_same_kind("rope", x, table);
  SB_CHECK(x.ndim() == 3 && heads > 0 && head_dim > 0 && head_dim % 2 == 0 &&
               heads * head_dim <= x.size(2),
           "rope: ", heads, " heads of ", head_dim,
           " columns in rows of shape ", shape_text(x.shape()),
           "; give [batch, sequence, width] with even heads inside width");
  SB_CHECK(table.shape() == (Shape{x.size(1), head_dim}),
           "rope: a table of shape ", shape_text(table.shape()), " for ",
           x.size(1), " tokens and heads of ", head_dim, " columns");
  kernels::RopeArgs args;
  args.rows = x.size(0) * x.size(1);
  args.tokens = x.size(1);
  args.width = x.size(2);
  args.heads = heads;
  args.head_dim = head_dim;
  Tensor y = turn(x, table, args);
  args.backward = true;
  autograd::record("rope", {x}, {y},
                   [args, table = table.detach()](const Tensors& grads) {
                     return Tensors{turn(grads[0], table, args)};
                   });
  return y;
}

}  // namespace shardbook
