#include "chapters/11_dtensor/local_ops.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/context.h"
#include "core/ops.h"

namespace shardbook::dtensor {

Tensor embedding_of_rows(const Tensor& table, const Tensor& indices,
                         std::int64_t first) {
  if (table.size(0) > 0) return embedding_part(table, indices, first);
  // Zeros that depend on the table: backward must pass here on every rank
  Shape shape = indices.shape();
  shape.push_back(table.size(1));
  return add(Tensor::zeros(shape, table.options()), sum(table, 0));
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
