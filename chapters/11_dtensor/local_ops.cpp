#include "chapters/11_dtensor/local_ops.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/context.h"
#include "core/ops.h"

namespace shardbook::dtensor {

Tensor embedding_of_rows(const Tensor& table, const Tensor& indices,
                         std::int64_t first) {
  const std::int64_t rows = table.size(0);
  Shape shape = indices.shape();
  shape.push_back(table.size(1));
  if (rows == 0) {
    // Zeros that depend on the table: backward must pass here on every rank
    const Tensor zeros = Tensor::zeros(shape, table.options());
    return add(zeros, sum(table, 0));
  }
  std::vector<std::int64_t> local(static_cast<std::size_t>(indices.numel()));
  std::vector<double> is_mine(local.size(), 0);
  if (!indices.is_meta()) {
    const auto global = indices.to_vector<std::int64_t>();
    for (std::size_t i = 0; i < global.size(); ++i) {
      const std::int64_t row = global[i] - first;
      if (row < 0 || row >= rows) continue;
      local[i] = row;
      is_mine[i] = 1;
    }
  }
  shape.back() = 1;
  const Tensor rows_here =
      Tensor::from_values(local, indices.shape(), indices.device());
  const Tensor mask = to_dtype(
      Tensor::from_values(is_mine, shape, table.device()), table.dtype());
  return mul(embedding(table, rows_here), mask);
}

Tensor extreme(const Tensor& x, std::int64_t dim, bool is_max) {
  NoGrad no_grad;
  const auto d = static_cast<std::size_t>(dim);
  Shape shape = x.shape();
  shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(dim));
  if (x.is_meta()) return Tensor::empty(shape, x.options());
  std::int64_t outer = 1, inner = 1;
  for (std::size_t i = 0; i < d; ++i) outer *= x.shape()[i];
  for (std::size_t i = d + 1; i < x.shape().size(); ++i) inner *= x.shape()[i];
  const std::int64_t n = x.size(dim);

  const std::vector<double> values = x.to_vector<double>();
  const double worst = std::numeric_limits<double>::infinity();
  std::vector<double> best(static_cast<std::size_t>(outer * inner),
                           is_max ? -worst : worst);
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t k = 0; k < n; ++k) {
      for (std::int64_t i = 0; i < inner; ++i) {
        const double value =
            values[static_cast<std::size_t>((o * n + k) * inner + i)];
        double& so_far = best[static_cast<std::size_t>(o * inner + i)];
        so_far = is_max ? std::max(so_far, value) : std::min(so_far, value);
      }
    }
  }
  return to_dtype(Tensor::from_values(best, shape, x.device()), x.dtype());
}

}  // namespace shardbook::dtensor
