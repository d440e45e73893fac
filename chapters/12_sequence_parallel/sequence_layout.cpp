#include "chapters/12_sequence_parallel/sequence_layout.h"

#include <cstddef>
#include <map>

#include "core/check.h"

namespace shardbook::sequence_parallel {

Layout layout_of(const std::string& name) {
  for (Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    if (name == layout_name(layout)) return layout;
  }
  throw Error("--layout " + name + ": give contiguous, zigzag or striped");
}

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kZigzag:
      return "zigzag";
    default:
      return "striped";
  }
}

void check_sequence(Layout layout, int c, std::int64_t s) {
  const std::int64_t parts = layout == Layout::kZigzag ? 2 * c : c;
  SB_CHECK(s > 0 && s % parts == 0, "--seq ", s, ": ", c, " ranks with ",
           layout_name(layout), " tokens need a multiple of ", parts,
           ", such as ", (s / parts + 1) * parts);
}

std::vector<TokenRun> token_runs(Layout layout, int rank, int c,
                                 std::int64_t s) {
  check_sequence(layout, c, s);
  const std::int64_t n = s / c;
  switch (layout) {
    case Layout::kContiguous:
      return {{rank * n, n, 1}};
    case Layout::kStriped:
      return {{rank, n, c}};
    default:
      return {{rank * n / 2, n / 2, 1}, {(2 * c - 1 - rank) * n / 2, n / 2, 1}};
  }
}

std::vector<std::int64_t> positions(Layout layout, int rank, int c,
                                    std::int64_t s) {
  std::vector<std::int64_t> all;
  for (const TokenRun& run : token_runs(layout, rank, c, s)) {
    for (std::int64_t i = 0; i < run.count; ++i) {
      all.push_back(run.first + i * run.step);
    }
  }
  return all;
}

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

namespace {

/// Zigzag's blocks in which each side holds tokens of one run.
std::vector<AttentionBlock> blocks_of_runs(int rank, int source, int c,
                                           std::int64_t n, bool causal) {
  const std::int64_t half = n / 2;
  const RowRange halves[2] = {{0, half}, {half, n}};
  const int own[2] = {rank, 2 * c - 1 - rank};
  const int theirs[2] = {source, 2 * c - 1 - source};
  std::vector<AttentionBlock> blocks;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      if (causal && theirs[j] > own[i]) continue;
      blocks.push_back(
          {halves[i], halves[j], causal && theirs[j] == own[i], 0});
    }
  }
  return blocks;
}

}  // namespace

std::vector<AttentionBlock> visible_blocks(Layout layout, int rank, int source,
                                           int c, std::int64_t n, bool causal,
                                           bool runs_apart) {
  const RowRange all{0, n};
  if (layout == Layout::kZigzag && runs_apart) {
    return blocks_of_runs(rank, source, c, n, causal);
  }
  if (!causal) return {{all, all, false, 0}};
  // This rank's own keys are in the order of its queries
  if (source == rank) return {{all, all, true, 0}};
  if (layout == Layout::kStriped) {
    // Query a is token a c + rank, key b is token b c + source
    return {{all, all, true, source < rank ? 0 : -1}};
  }
  if (layout == Layout::kContiguous) {
    if (source > rank) return {};
    return {{all, all, false, 0}};
  }
  // Zigzag: of an earlier rank its first chunk, for a later one our second
  if (source < rank) return {{all, {0, n / 2}, false, 0}};
  return {{{n / 2, n}, all, false, 0}};
}

ShardView shard_of(const AttentionBlock& block, Layout layout, int rank,
                   int source, int c, std::int64_t batch, std::int64_t heads,
                   std::int64_t s) {
  // The run that the rows are in, and where they begin in it
  const auto place = [&](int holder, const RowRange& rows) {
    std::int64_t begin = rows.begin;
    for (const TokenRun& run : token_runs(layout, holder, c, s)) {
      if (begin < run.count) {
        SB_CHECK(begin + rows.size() <= run.count, "shard_of: rows ",
                 rows.begin, " to ", rows.end, " lie in two runs of tokens");
        return TokenRun{run.first + begin * run.step, rows.size(), run.step};
      }
      begin -= run.count;
    }
    return TokenRun{};
  };
  const TokenRun queries = place(rank, block.queries);
  const TokenRun keys = place(source, block.keys);
  return {{batch, heads, s, s},
          {0, 0, queries.first, keys.first},
          {1, 1, queries.step, keys.step}};
}

}  // namespace shardbook::sequence_parallel
