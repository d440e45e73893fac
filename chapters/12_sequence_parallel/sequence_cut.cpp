// Tensors cut by layouts of sequences.

#include <cstddef>
#include <map>

#include "chapters/12_sequence_parallel/sequence_layout.h"

namespace shardbook::sequence_parallel {

Tensor cut_sequence(const Tensor& whole, std::int64_t dim, Layout layout,
                    int rank, int c) {
  const std::int64_t s = whole.size(dim);
  check_sequence(layout, c, s);
  if (c == 1) return whole;
  if (layout == Layout::kStriped) {
    // Token i c + r is element [i, r] of [s / c, c]
    Shape split = whole.shape(), own = whole.shape();
    const auto at = split.begin() + dim;
    *at = c;
    split.insert(split.begin() + dim, s / c);
    own[static_cast<std::size_t>(dim)] = s / c;
    return reshape(slice(reshape(whole, split), dim + 1, rank, rank + 1), own);
  }
  Tensors parts;
  for (const TokenRun& run : token_runs(layout, rank, c, s)) {
    parts.push_back(slice(whole, dim, run.first, run.first + run.count));
  }
  return parts.size() == 1 ? parts[0] : concat(parts, dim);
}

Tensor join_sequence(const Tensors& parts, std::int64_t dim, Layout layout) {
  const int c = static_cast<int>(parts.size());
  const std::int64_t n = parts[0].size(dim);
  if (layout == Layout::kStriped) {
    Shape apart = parts[0].shape(), whole = parts[0].shape();
    apart.insert(apart.begin() + dim + 1, 1);
    whole[static_cast<std::size_t>(dim)] = n * c;
    Tensors columns;
    for (const Tensor& part : parts) columns.push_back(reshape(part, apart));
    return reshape(concat(columns, dim + 1), whole);
  }
  // The ranks' runs in the order of their first tokens
  std::map<std::int64_t, Tensor> runs;
  for (int r = 0; r < c; ++r) {
    std::int64_t begin = 0;
    for (const TokenRun& run : token_runs(layout, r, c, n * c)) {
      runs[run.first] = slice(parts[static_cast<std::size_t>(r)], dim, begin,
                              begin + run.count);
      begin += run.count;
    }
  }
  Tensors in_order;
  for (const auto& [first, part] : runs) in_order.push_back(part);
  return concat(in_order, dim);
}

}  // namespace shardbook::sequence_parallel
