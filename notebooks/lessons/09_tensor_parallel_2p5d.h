#pragma once

// What the notebook 09_tensor_parallel_2p5d calls: who holds what on squares,
// the gradient of one device, runs on ranks and on shapes, and tables of them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "core/ops.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

/// The blocks of X and W that each rank of d squares holds.
inline Picture holders_on(int q, int d, std::int64_t rows,
                          std::int64_t columns) {
  const auto of_x = [q, d](int rank) {
    const summa::Place place = summa::place_of(rank, q);
    const int k = rank / (q * q);
    return Shards{{0, k * q + place.i, d * q}, {1, place.j, q}};
  };
  const auto of_w = [q](int rank) {
    return summa::matrix_part(summa::place_of(rank, q));
  };
  return holders("Each square has its own rows of X, and all of W",
                 {dtensor::held_by("X", {rows, columns}, d * q * q, of_x),
                  dtensor::held_by("W", {columns, columns}, d * q * q, of_w)});
}

/// The rows [4, 4] of a square: normal numbers. Squares may have equal ones.
inline Tensor rows_of(const std::string& name, int square, bool are_different) {
  return numbers({4, 4}, joined(name, are_different ? square : 0));
}

/// This rank's block of its square's rows.
inline Tensor block_of(const std::string& name, const summa::Grid& grid,
                       bool are_different) {
  return take_part(rows_of(name, grid.k(), are_different),
                   summa::matrix_part(grid.place()));
}

/// Between a block of dW and that of one device, which has all rows.
inline double distance_from_one_device(const Tensor& dw,
                                       const summa::Grid& grid,
                                       bool are_different) {
  Tensor right = Tensor::full({4, 4}, 0, {DType::kF64, Device()});
  for (int k = 0; k < grid.d(); ++k) {
    right = add(right, matmul(rows_of("X", k, are_different),
                              rows_of("dY", k, are_different), true));
  }
  return max_abs_difference(dw, take_part(scale(right, 1.0 / grid.d()),
                                          summa::matrix_part(grid.place())));
}

inline std::string largest(const std::vector<double>& distances) {
  return fixed(*std::max_element(distances.begin(), distances.end()), 6);
}

/// What the products of a block of width h send, forward and backward.
inline double block_elements(double q, double d, double tokens, double h) {
  return summa::over_linears(h, [&](double rows, double columns) {
    return summa::linear_elements(q, d, tokens, rows, columns);
  });
}

/// Elements on 64 ranks, a row for each number of tokens in units of h.
inline Picture depths(const std::vector<double>& tokens_over_h) {
  Rows rows = {{"bs / h"}};
  for (const double d : {1, 4, 16, 64}) {
    rows[0].push_back("d = " + fixed(d, 0) +
                      ", q = " + fixed(std::sqrt(64 / d), 0));
  }
  for (const double x : tokens_over_h) {
    rows.push_back({fixed(x, 2)});
    for (const double d : {1, 4, 16, 64}) {
      rows.back().push_back(
          fixed(block_elements(std::sqrt(64 / d), d, x, 1), 1));
    }
  }
  return table(rows);
}

/// The smallest GPT on threads.
inline const std::string kSmall =
    " --model gpt-nano --data walk --batch 8 --seq 32 --steps 4";

inline Report train(const std::string& options, int q, int d) {
  return run(joined("09_tensor_parallel_2p5d --depth ", d, " --world-size ",
                    d * q * q, options));
}

/// What a rank of GPT-2 medium on 16 ranks sends in a step, by the depth.
inline Picture sent(const std::string& title, std::int64_t tokens) {
  const std::string options = joined(
      " --backend sim --cluster textbook --model gpt2-medium --data random "
      "--batch 16 --steps 1 --seq ",
      tokens / 16);
  std::vector<Bar> all;
  for (const int d : {1, 4, 16}) {
    const int q = static_cast<int>(std::sqrt(16 / d));
    all.push_back(
        {joined("d = ", d), train(options, q, d).ranks[0].bytes.counted});
  }
  return bars(title, all, {"GB", 1e9}, "comm");
}

/// What small trainings send and hold.
inline Picture compare(const std::vector<std::pair<int, int>>& sizes) {
  Rows rows = {{"q", "d", "ranks", "sent per rank", "parameters", "activations",
                "equal"}};
  for (const auto& [q, d] : sizes) {
    const Report report = train(kSmall, q, d);
    rows.push_back({std::to_string(q), std::to_string(d),
                    std::to_string(d * q * q),
                    kib(report.ranks[0].bytes.counted),
                    kib(peak_of(report, MemoryKind::kParameter)),
                    kib(peak_of(report, MemoryKind::kActivation)),
                    report.parity.passed ? "yes" : "NO"});
  }
  return table(rows);
}

/// The rank in row i and column j of square k.
inline double rank_at(int i, int j, int k, int q) {
  int rank = k * q * q;  // the first one of the square
  for (summa::Place at = summa::place_of(rank, q); at.i != i || at.j != j;) {
    at = summa::place_of(++rank, q);
  }
  return rank;
}

/// Of 64 ranks.
inline double best_depth(double tokens_over_h) {
  int best = 1;
  double least = block_elements(8, 1, tokens_over_h, 1);
  for (const int d : {4, 16, 64}) {
    const double elements =
        block_elements(std::sqrt(64.0 / d), d, tokens_over_h, 1);
    if (elements < least) best = d;
    least = std::min(least, elements);
  }
  return best;
}

}  // namespace notes
