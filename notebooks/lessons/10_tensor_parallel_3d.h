#pragma once

// What the notebook 10_tensor_parallel_3d calls: matrices and their parts on a
// cube, the comparison of ways to cut a layer, trainings, and tables.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/10_tensor_parallel_3d/bill.h"
#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "core/ops.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// A rank's part of an activation.
inline Shards part_of_x(const cube::Place& place, cube::Layout layout) {
  const auto at = place.block(layout);
  return {{0, at.row, at.rows}, {1, at.column, at.columns}};
}

/// X, W and Y, n x n, on q^3 ranks.
inline std::vector<dtensor::Held> three_matrices(int q, std::int64_t n) {
  const auto x = [q](int rank) {
    return part_of_x(cube::place_of(rank, q), cube::Layout::kStraight);
  };
  const auto w = [q](int rank) {
    return cube::weight_part(cube::place_of(rank, q), cube::Layout::kStraight);
  };
  const auto y = [q](int rank) {
    return part_of_x(cube::place_of(rank, q), cube::Layout::kSwapped);
  };
  const int ranks = q * q * q;
  return {dtensor::held_by("X", {n, n}, ranks, x),
          dtensor::held_by("W", {n, n}, ranks, w),
          dtensor::held_by("Y", {n, n}, ranks, y)};
}

/// n x n numbers that look random, and depend on the name alone.
inline Tensor numbers(std::int64_t n, const char* name) {
  return notebook::numbers({n, n}, name);
}

/// The ranks' rows, one below the other.
inline Tensor gathered(const Tensor& own, ProcessGroup& group) {
  const Tensor all =
      Tensor::empty({own.size(0) * group.size(), own.size(1)}, own.options());
  group.all_gather(all, own).wait();
  return all;
}

/// This rank's rows of the sum of the ranks' terms.
inline Tensor scattered(const Tensor& terms, ProcessGroup& group) {
  const Tensor own = Tensor::empty(
      {terms.size(0) / group.size(), terms.size(1)}, terms.options());
  group.reduce_scatter(own, terms).wait();
  return own;
}

inline std::string largest(const std::vector<double>& errors) {
  const double value = *std::max_element(errors.begin(), errors.end());
  return value < 1e-12 ? "less than 1e-12" : fixed(value, 2);
}

/// A block of h = 4096 in bf16, in all ways, on shapes.
inline cube::Comparison comparison(const std::string& cluster,
                                   const std::vector<int>& ranks,
                                   const std::vector<double>& tokens_over_h) {
  Options options;
  options.cluster = cluster;
  options.dtype = DType::kBF16;
  cube::ComparedLayer layer;
  layer.ranks = ranks;
  layer.tokens_over_h = tokens_over_h;
  return cube::compare(options, layer);
}

/// Where 3D begins to send less than 1D: by the page's inequality, and counted.
inline Picture points(const cube::Comparison& all,
                      const std::vector<int>& sides) {
  Rows lines = {{"ranks", "3 / (q^2 + q - 3)", "counted, bs / h"}};
  for (const int q : sides) {
    const std::vector<cube::Lead> leads = cube::leads(all, q * q * q);
    const double tokens = leads.size() > 1 ? leads[1].tokens : 0;
    lines.push_back({std::to_string(q * q * q), fixed(3.0 / (q * q + q - 3), 2),
                     fixed(tokens / static_cast<double>(all.layer.h), 2)});
  }
  return table(lines);
}

/// Eight ranks on threads train the smallest GPT.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 8 --batch 8 --seq 32 --steps 4";

inline Bar activation_bar(const std::string& name, const Report& report) {
  const double bytes = peak_of(report, MemoryKind::kActivation);
  return {name, bytes, 0,
          kib(bytes) + ", " + kib(report.ranks[0].bytes.counted) + " sent"};
}

/// The number of rank (i, j, k) on a cube of side q.
inline double rank_at(int i, int j, int k, int q) {
  for (int rank = 0; rank < q * q * q; ++rank) {
    const cube::Place at = cube::place_of(rank, q);
    if (at.i == i && at.j == j && at.k == k) return rank;
  }
  return -1;
}

/// Whether an MLP h -> 4h -> h on 27 ranks sends as much in 1D as in 3D.
inline bool is_crossover(double tokens, double h) {
  const double in_3d = cube::linear_elements(3, tokens, h, 4 * h) +
                       cube::linear_elements(3, tokens, 4 * h, h);
  const double in_1d = 4 * 26.0 / 27 * tokens * h;
  return tokens > 0 && std::abs(in_3d - in_1d) < 1e-9 * in_1d;
}

}  // namespace notes
