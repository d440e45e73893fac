#pragma once

// What the notebooks 08_tensor_parallel_2d, 09_tensor_parallel_2p5d and
// 10_tensor_parallel_3d call: parts of matrices on a square, on squares and on
// a cube, products to be checked, and bytes and times in each of these ways.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
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

/// A training of a moment.
inline const std::string kSmall = " --batch 8 --steps 4" + kNano;

inline double largest(const std::vector<double>& errors) {
  return *std::max_element(errors.begin(), errors.end());
}

/// What the products of a block of width h send, forward and backward, on d
/// squares of q x q ranks.
inline double block_elements(double q, double d, double tokens, double h) {
  return summa::over_linears(h, [&](double rows, double columns) {
    return summa::linear_elements(q, d, tokens, rows, columns);
  });
}

/// For exercises: whether an MLP h -> 4h -> h sends as much in 1D as in 2D on
/// 16 ranks, or as in 3D on 27.
inline bool is_crossover(double tokens, double h, int ranks) {
  const auto elements = [&](double rows, double columns) {
    return ranks == 16 ? summa::linear_elements(4, 1, tokens, rows, columns)
                       : cube::linear_elements(3, tokens, rows, columns);
  };
  const double in_1d = 4.0 * (ranks - 1) / ranks * tokens * h;
  const double in_more = elements(h, 4 * h) + elements(4 * h, h);
  return tokens > 0 && std::abs(in_more - in_1d) < 1e-9 * in_1d;
}

// --- 2D: places and products -------------------------------------------------

/// An n x n matrix and a vector of n, as the ranks of a square hold them.
inline Picture holders_on_square(int q, std::int64_t n) {
  const auto block = [q](int rank) {
    return summa::matrix_part(summa::place_of(rank, q));
  };
  const auto piece = [q](int rank) {
    return summa::vector_part(summa::place_of(rank, q));
  };
  return holders("Each rank has one block of a matrix, one piece of a vector",
                 {dtensor::held_by("matrix", {n, n}, q * q, block),
                  dtensor::held_by("vector", {n}, q * q, piece)});
}

/// Each rank's place on the square, and its number in each of its groups.
inline Picture numbers_in_groups(int q) {
  const auto numbers = [q](ProcessGroup& world) {
    DeviceMesh mesh(world, summa::square(q));
    const summa::Grid grid = summa::grid_of(mesh);
    const summa::Place place = summa::place_of(world.rank(), q);
    return std::vector<double>{1.0 * place.i, 1.0 * place.j,
                               1.0 * grid.row->rank(), 1.0 * grid.col->rank()};
  };
  return by_rank({"rank", "i", "j", "number in ROW", "number in COL"},
                 on_ranks(q * q, numbers), 0);
}

/// This rank's block of a product after `steps` steps, from blocks of X and W.
using Product = Tensor (*)(const Tensor& x, const Tensor& w, ProcessGroup& row,
                           ProcessGroup& col, int steps);

/// How far this rank's block is from the right one after 0 to q steps. On 3 x 3
/// ranks, matrices of 12 x 12.
inline std::vector<double> distances_of(ProcessGroup& world, Product product,
                                        bool is_exchanged) {
  constexpr int kSide = 3;
  constexpr std::int64_t kSize = 12;
  DeviceMesh mesh(world, summa::square(kSide));
  const summa::Grid grid = summa::grid_of(mesh);
  const Tensor whole_x = numbers({kSize, kSize}, "x"),
               whole_w = numbers({kSize, kSize}, "w");
  const Shards block = summa::matrix_part(grid.place());
  const Tensor x = take_part(whole_x, block), w = take_part(whole_w, block);
  const Tensor right = take_part(matmul(whole_x, whole_w), block);
  ProcessGroup& row = is_exchanged ? *grid.col : *grid.row;
  ProcessGroup& col = is_exchanged ? *grid.row : *grid.col;
  std::vector<double> distances;
  for (int steps = 0; steps <= kSide; ++steps) {
    distances.push_back(
        max_abs_difference(product(x, w, row, col, steps), right));
  }
  return distances;
}

inline Picture distances_table(const std::vector<std::vector<double>>& all) {
  return by_rank(
      {"rank", "at the start", "after step 0", "after step 1", "after step 2"},
      all, 6);
}

// --- 2D: bytes, times, norms -------------------------------------------------

/// Elements that an average rank sends: roots send more than the others.
inline double counted_elements(
    const std::vector<std::vector<CommRecord>>& ranks) {
  double elements = 0;
  for (const auto& records : ranks) elements += sent_elements(records);
  return elements / static_cast<double>(ranks.size());
}

/// What 2D sends in the products of a block for each element that 1D sends.
inline Picture bytes_2d_over_1d(const std::vector<double>& tokens_over_h) {
  const auto row = [](double x) {
    Cells row = {fixed(x, 2)};
    for (const double q : {2, 4, 8, 16}) {
      const double in_1d = 4 * 2 * (q * q - 1) / (q * q) * x;
      row.push_back(fixed(block_elements(q, 1, x, 1) / in_1d, 2));
    }
    return row;
  };
  return table_of(
      {"tokens over h", "4 ranks", "16 ranks", "64 ranks", "256 ranks"},
      tokens_over_h, row);
}

/// Parameters and activations of a rank in one dimension and in two.
inline Picture memories_1d_and_2d(const Report& in_1d, const Report& in_2d) {
  constexpr auto kParameter = MemoryKind::kParameter;
  constexpr auto kActivation = MemoryKind::kActivation;
  return bars("2D cuts the activations as well",
              {{"1D, parameters", peak_of(in_1d, kParameter)},
               {"2D, parameters", peak_of(in_2d, kParameter)},
               {"1D, activations", peak_of(in_1d, kActivation)},
               {"2D, activations", peak_of(in_2d, kActivation)}},
              {"KiB", 1024}, "space");
}

/// A step of GPT 6.7B, of three, in bf16 on 16 simulated A100, samples of 1024
/// tokens.
inline Picture steps_on_a100s(const std::vector<int>& samples) {
  const auto row = [](int batch) {
    const std::string options =
        joined(kA100s,
               " --model gpt-6.7b --dtype bf16 --world-size 16 --seq 1024 "
               "--steps 3 --batch ",
               batch);
    const Report in_1d = run("07_tensor_parallel" + options),
                 in_2d = run("08_tensor_parallel_2d" + options);
    return cells(1024 * batch, fixed(sent_bytes(in_1d) / 3e9, 1) + " GB",
                 fixed(sent_bytes(in_2d) / 3e9, 1) + " GB",
                 ms(step_s(in_1d), 0), ms(step_s(in_2d), 0));
  };
  return table_of({"tokens", "1D sends", "2D sends", "1D takes", "2D takes"},
                  samples, row);
}

/// Error of the norm, in f32, of rows of 8 whose mean is `mean`, cut over ranks.
inline double norm_error(ProcessGroup& world, double mean) {
  const Tensor x = numbers({4, 8}, "x", mean);
  const auto part = [&](const Tensor& whole, std::int64_t dim) {
    return take_part(to_dtype(whole, DType::kF32),
                     {{dim, world.rank(), world.size()}});
  };
  const Tensor ones = Tensor::full({8}, 1, x.options());
  const Tensor zeros = ones.zeros_like();
  const Tensor y =
      summa::split_layer_norm(part(x, 1), part(ones, 0), part(zeros, 0), world,
                              /*eps=*/1e-5);
  const Tensor right = layer_norm(x, ones, zeros);
  return max_abs_difference(to_dtype(y, DType::kF64),
                            to_dtype(part(right, 1), DType::kF64));
}

inline Picture norm_errors(const std::vector<double>& means) {
  return table_of({"mean", "largest error"}, means, [](double mean) {
    return cells(mean, fixed(on_ranks(2, norm_error, mean)[0], 6));
  });
}

// --- 2.5D --------------------------------------------------------------------

/// The blocks of X and W, n x n, that each rank of d squares holds.
inline Picture holders_on_squares(int q, int d, std::int64_t n) {
  const auto of_x = [q, d](int rank) {
    const summa::Place place = summa::place_of(rank, q);
    const int k = rank / (q * q);
    return Shards{{0, k * q + place.i, d * q}, {1, place.j, q}};
  };
  const auto of_w = [q](int rank) {
    return summa::matrix_part(summa::place_of(rank, q));
  };
  return holders("Each square has its own rows of X, and all of W",
                 {dtensor::held_by("X", {n, n}, d * q * q, of_x),
                  dtensor::held_by("W", {n, n}, d * q * q, of_w)});
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

/// What a block sends on 64 ranks in d squares, in units of h^2.
inline double elements_at_depth(double d, double tokens_over_h) {
  return block_elements(std::sqrt(64 / d), d, tokens_over_h, 1);
}

/// Elements on 64 ranks, a row for each number of tokens in units of h.
inline Picture depths(const std::vector<double>& tokens_over_h) {
  const auto row = [](double x) {
    Cells row = {fixed(x, 2)};
    for (const double d : {1, 4, 16, 64}) {
      row.push_back(fixed(elements_at_depth(d, x), 1));
    }
    return row;
  };
  return table_of({"bs / h", "d = 1, q = 8", "d = 4, q = 4", "d = 16, q = 2",
                   "d = 64, q = 1"},
                  tokens_over_h, row);
}

/// For an exercise: the depth of 64 ranks that sends the least.
inline double best_depth(double tokens_over_h) {
  const std::vector<double> all = {1, 4, 16, 64};
  return *std::min_element(all.begin(), all.end(), [&](double a, double b) {
    return elements_at_depth(a, tokens_over_h) <
           elements_at_depth(b, tokens_over_h);
  });
}

inline Report train(const std::string& options, int q, int d) {
  return run(joined("09_tensor_parallel_2p5d --depth ", d, " --world-size ",
                    d * q * q, options));
}

/// What a rank of GPT-2 medium on 16 ranks sends in a step, by the depth.
inline Picture sent(const std::string& title, std::int64_t tokens) {
  const std::string options =
      joined(kTextbook, " --model gpt2-medium --batch 16 --steps 1 --seq ",
             tokens / 16);
  return bars(title,
              {{"d = 1", sent_bytes(train(options, 4, 1))},
               {"d = 4", sent_bytes(train(options, 2, 4))},
               {"d = 16", sent_bytes(train(options, 1, 16))}},
              {"GB", 1e9}, "comm");
}

/// What small trainings send and hold, for pairs of q and d.
inline Picture compare(const std::vector<std::pair<int, int>>& sizes) {
  const auto row = [](const std::pair<int, int>& size) {
    const auto& [q, d] = size;
    const Report report = train(kSmall, q, d);
    return cells(q, d, d * q * q, kib(sent_bytes(report)),
                 kib(peak_of(report, MemoryKind::kParameter)),
                 kib(peak_of(report, MemoryKind::kActivation)),
                 report.parity.passed ? "yes" : "NO");
  };
  return table_of({"q", "d", "ranks", "sent per rank", "parameters",
                   "activations", "equal"},
                  sizes, row);
}

// --- 3D ----------------------------------------------------------------------

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

/// Where 3D begins to send less than 1D: by the page's inequality, and counted.
inline Picture points(const cube::Comparison& all,
                      const std::vector<int>& sides) {
  const auto row = [&](int q) {
    const std::vector<cube::Lead> leads = cube::leads(all, q * q * q);
    const double tokens = leads.size() > 1 ? leads[1].tokens : 0;
    return cells(q * q * q, fixed(3.0 / (q * q + q - 3), 2),
                 fixed(tokens / static_cast<double>(all.layer.h), 2));
  };
  return table_of({"ranks", "3 / (q^2 + q - 3)", "counted, bs / h"}, sides,
                  row);
}

inline Bar activations_and_bytes(const std::string& name,
                                 const Report& report) {
  const double bytes = peak_of(report, MemoryKind::kActivation);
  return {name, bytes, 0,
          kib(bytes) + ", " + kib(sent_bytes(report)) + " sent"};
}

}  // namespace notes
