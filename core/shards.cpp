#include "core/shards.h"

#include <algorithm>

#include "core/check.h"
#include "core/copy_runs.h"

namespace shardbook {
namespace {

using Runs = std::vector<IndexRun>;

// The indices that positions [begin, begin + count) of `runs` stand for.
void append(const Runs& runs, std::int64_t begin, std::int64_t count,
            Runs& result) {
  for (const IndexRun& run : runs) {
    const std::int64_t from = std::max<std::int64_t>(begin, 0);
    const std::int64_t n = std::min(begin + count, run.count) - from;
    begin -= run.count;
    if (n <= 0) continue;
    const std::int64_t first = run.begin + from;
    if (!result.empty() && result.back().begin + result.back().count == first) {
      result.back().count += n;
    } else {
      result.push_back({first, n});
    }
  }
}

Runs cut(const Runs& runs, const Shard& shard) {
  std::int64_t length = 0;
  for (const IndexRun& run : runs) length += run.count;
  const std::int64_t block = length / shard.blocks;
  const std::int64_t own = (block + shard.count - 1) / shard.count;
  Runs result;
  for (std::int64_t b = 0; b < shard.blocks; ++b) {
    append(runs, b * block + shard.index * own, own, result);
  }
  return result;
}

// Calls copy(offset in the whole, offset in the part, elements) for every piece
// that is consecutive in both.
void for_each_piece(
    const Shape& whole, const Shards& shards,
    const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& copy) {
  // Dimensions after the last cut are copied together
  std::size_t cut_dims = 0;
  for (const Shard& shard : shards) {
    cut_dims = std::max(cut_dims, static_cast<std::size_t>(shard.dim) + 1);
  }
  std::int64_t behind = 1;
  for (std::size_t d = cut_dims; d < whole.size(); ++d) behind *= whole[d];
  std::int64_t next = 0;
  const std::function<void(std::size_t, std::int64_t)> visit =
      [&](std::size_t dim, std::int64_t row) {
        if (dim == cut_dims) {
          copy(row * behind, next, behind);
          next += behind;
          return;
        }
        const std::int64_t base = row * whole[dim];
        for (const IndexRun& run :
             runs_of(shards, whole, static_cast<std::int64_t>(dim))) {
          if (dim + 1 == cut_dims) {
            copy((base + run.begin) * behind, next, run.count * behind);
            next += run.count * behind;
            continue;
          }
          for (std::int64_t i = 0; i < run.count; ++i) {
            visit(dim + 1, base + run.begin + i);
          }
        }
      };
  visit(0, 0);
}

}  // namespace

Shape shape_of(const Shards& shards, const Shape& whole) {
  Shape part = whole;
  for (const Shard& shard : shards) {
    if (shard.count == 1) continue;
    const auto d = static_cast<std::size_t>(shard.dim);
    const bool is_valid =
        d < part.size() && shard.index >= 0 && shard.index < shard.count;
    if (shard.length > 0) {
      SB_CHECK(is_valid && part[d] == shard.length && shard.blocks == 1,
               "shard ", shard.index, " of ", shard.count, ": dim ", shard.dim,
               " of shape ", shape_text(part), " has not the length ",
               shard.length);
      const std::int64_t own = (shard.length + shard.count - 1) / shard.count;
      part[d] =
          std::clamp<std::int64_t>(shard.length - shard.index * own, 0, own);
      continue;
    }
    SB_CHECK(is_valid && part[d] % (shard.blocks * shard.count) == 0, "shard ",
             shard.index, " of ", shard.count, ": dim ", shard.dim,
             " of shape ", shape_text(part), " does not divide into ",
             shard.blocks, " blocks of ", shard.count, " equal parts");
    part[d] /= shard.count;
  }
  return part;
}

Shape whole_shape(const Shards& shards, Shape part) {
  for (auto shard = shards.rbegin(); shard != shards.rend(); ++shard) {
    std::int64_t& size = part[static_cast<std::size_t>(shard->dim)];
    size = shard->length > 0 ? shard->length : size * shard->count;
  }
  return part;
}

std::vector<IndexRun> runs_of(const Shards& shards, const Shape& whole,
                              std::int64_t dim) {
  Runs runs = {{0, whole[static_cast<std::size_t>(dim)]}};
  for (const Shard& shard : shards) {
    if (shard.dim != dim || shard.count == 1) continue;
    runs = cut(runs, shard);
  }
  return runs;
}

Tensor take_part(const Tensor& whole, const Shards& shards) {
  const Tensor part =
      Tensor::empty(shape_of(shards, whole.shape()), whole.options());
  const ManyCopies copies("take_part", part, whole);
  for_each_piece(whole.shape(), shards,
                 [&](std::int64_t in_whole, std::int64_t in_part,
                     std::int64_t n) { copies.copy(in_part, in_whole, n); });
  return part;
}

void put_part(const Tensor& whole, const Tensor& part, const Shards& shards) {
  SB_CHECK(part.shape() == shape_of(shards, whole.shape()),
           "put_part: a part of shape ", shape_text(part.shape()), ", not ",
           shape_text(shape_of(shards, whole.shape())));
  const ManyCopies copies("put_part", whole, part);
  for_each_piece(whole.shape(), shards,
                 [&](std::int64_t in_whole, std::int64_t in_part,
                     std::int64_t n) { copies.copy(in_whole, in_part, n); });
}

}  // namespace shardbook
