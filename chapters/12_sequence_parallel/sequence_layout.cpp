#include "chapters/12_sequence_parallel/sequence_layout.h"

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

double visible_pairs(Layout layout, int rank, int source, int c,
                     std::int64_t n) {
  double pairs = 0;
  for (const AttentionBlock& block :
       visible_blocks(layout, rank, source, c, n, /*causal=*/true)) {
    pairs += shardbook::visible_pairs(block);
  }
  return pairs;
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
