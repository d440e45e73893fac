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

/// Calls visit(first index in the whole, width of the part, whether this rank is
/// the first of those that hold it) for each of the shard's columns.
template <typename Visit>
void for_each_column(const Shard& shard, const Visit& visit) {
  std::int64_t begin = 0;
  for (const Columns& columns : shard.columns) {
    const std::int64_t parts = columns.parts_on(shard.count);
    const std::int64_t holders = shard.count / parts;
    const std::int64_t own = columns.width / parts;
    visit(begin + shard.index / holders * own, own, shard.index % holders == 0);
    begin += columns.width;
  }
}

Runs cut(const Runs& runs, const Shard& shard) {
  if (!shard.columns.empty()) {
    Runs result;
    for_each_column(shard, [&](std::int64_t begin, std::int64_t own, bool) {
      append(runs, begin, own, result);
    });
    return result;
  }
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

/// The width of a part, and of the whole.
std::int64_t width_of_part(const Shard& shard, std::int64_t* whole) {
  std::int64_t part = 0;
  *whole = 0;
  for (const Columns& columns : shard.columns) {
    const std::int64_t parts = columns.parts_on(shard.count);
    SB_CHECK(
        parts > 0 && columns.width % parts == 0 && shard.count % parts == 0,
        "shard ", shard.index, " of ", shard.count, ": ", columns.width,
        " columns do not divide into ", parts, " equal parts");
    part += columns.width / parts;
    *whole += columns.width;
  }
  return part;
}

}  // namespace

Shard cut_columns(std::int64_t dim, std::int64_t index, std::int64_t count,
                  const std::vector<Columns>& columns) {
  const bool are_equal =
      std::all_of(columns.begin(), columns.end(), [&](const Columns& each) {
        return each.width == columns[0].width && each.parts_on(count) == count;
      });
  if (!are_equal) return {dim, index, count, 1, 0, columns};
  const auto blocks = static_cast<std::int64_t>(columns.size());
  return {dim, index, count, std::max<std::int64_t>(blocks, 1)};
}

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
    if (!shard.columns.empty()) {
      std::int64_t all = 0;
      const std::int64_t own = width_of_part(shard, &all);
      SB_CHECK(is_valid && part[d] == all, "shard ", shard.index, " of ",
               shard.count, ": dim ", shard.dim, " of shape ", shape_text(part),
               " has not ", all, " columns");
      part[d] = own;
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
    if (!shard->columns.empty()) {
      width_of_part(*shard, &size);
    } else {
      size = shard->length > 0 ? shard->length : size * shard->count;
    }
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

std::vector<IndexRun> first_held(const Shard& shard) {
  Runs held;
  std::int64_t next = 0;
  for_each_column(shard, [&](std::int64_t, std::int64_t own, bool is_first) {
    if (is_first) append({{next, own}}, 0, own, held);
    next += own;
  });
  return held;
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
