#pragma once

// What the notebook 08_tensor_parallel_2d calls: parts of matrices on a square,
// products to be checked, bytes and times in one dimension and in two.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// An n x n matrix and a vector of n, as the ranks of a square hold them.
inline Picture holders_on(int q, std::int64_t n) {
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

// --- Groups and products ---------------------------------------------------------

/// A rank's place on the square, and its number in each of its groups.
inline std::vector<double> place_and_numbers(ProcessGroup& world, int q) {
  DeviceMesh mesh(world, summa::square(q));
  const summa::Grid grid = summa::grid_of(mesh);
  const summa::Place place = summa::place_of(world.rank(), q);
  return {1.0 * place.i, 1.0 * place.j, 1.0 * grid.row->rank(),
          1.0 * grid.col->rank()};
}

inline Picture numbers_in_groups(int q) {
  return by_rank({"rank", "i", "j", "number in ROW", "number in COL"},
                 on_ranks(q * q, place_and_numbers, q), 0);
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
  std::vector<std::string> titles = {"rank", "at the start"};
  for (std::size_t step = 1; step < all[0].size(); ++step) {
    titles.push_back(joined("after step ", step - 1));
  }
  return by_rank(titles, all, 6);
}

// --- Bytes -----------------------------------------------------------------------

/// Elements that an average rank sends: roots send more than the others.
inline double counted_elements(
    const std::vector<std::vector<CommRecord>>& ranks) {
  double elements = 0;
  for (const auto& records : ranks) elements += sent_elements(records);
  return elements / static_cast<double>(ranks.size());
}

/// What 2D sends in the products of a block for each element that 1D sends.
inline Picture bytes_2d_over_1d(const std::vector<double>& tokens_over_h) {
  Rows rows = {{"tokens over h"}};
  for (const double q : {2, 4, 8, 16}) {
    rows[0].push_back(fixed(q * q, 0) + " ranks");
  }
  for (const double x : tokens_over_h) {
    rows.push_back({fixed(x, 2)});
    for (const double q : {2, 4, 8, 16}) {
      const double in_1d = 4 * 2 * (q * q - 1) / (q * q) * x;
      const double in_2d = summa::over_linears(1, [&](double k, double n) {
        return summa::linear_elements(q, 1, x, k, n);
      });
      rows.back().push_back(fixed(in_2d / in_1d, 2));
    }
  }
  return table(rows);
}

/// For the first exercise: an MLP h -> 4h -> h on 16 ranks.
inline bool is_crossover(double tokens, double h) {
  const double in_1d = 2 * 2 * 15.0 / 16 * tokens * h;
  const double in_2d = summa::linear_elements(4, 1, tokens, h, 4 * h) +
                       summa::linear_elements(4, 1, tokens, 4 * h, h);
  return tokens > 0 && std::abs(in_2d - in_1d) < 1e-6 * tokens * h;
}

/// For the second exercise: the first element of a rank's piece of a vector.
inline double first_element(int i, int j, int q, std::int64_t n) {
  const Shards piece = summa::vector_part({q, i, j});
  return static_cast<double>(runs_of(piece, {n}, /*dim=*/0)[0].begin);
}

// --- Trainings -------------------------------------------------------------------

/// A small GPT on a random walk; the loss begins at ln 256 = 5.55.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 4 --batch 8 --seq 32 --steps 6";

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
  Rows rows = {{"tokens", "1D sends", "2D sends", "1D takes", "2D takes"}};
  for (const int batch : samples) {
    const std::string options = joined(
        " --backend sim --cluster dgx-a100 --model gpt-6.7b --data random "
        "--dtype bf16 --world-size 16 --seq 1024 --steps 3 --batch ",
        batch);
    const Report in_1d = run("07_tensor_parallel" + options),
                 in_2d = run("08_tensor_parallel_2d" + options);
    const auto sent = [](const Report& report) {
      return fixed(report.ranks[0].bytes.counted / 3e9, 1) + " GB";
    };
    rows.push_back({std::to_string(1024 * batch), sent(in_1d), sent(in_2d),
                    ms(in_1d.time.step_s, 0), ms(in_2d.time.step_s, 0)});
  }
  return table(rows);
}

// --- Norms -----------------------------------------------------------------------

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
  Rows rows = {{"mean", "largest error"}};
  for (const double mean : means) {
    rows.push_back(
        {fixed(mean, 0), fixed(on_ranks(2, norm_error, mean)[0], 6)});
  }
  return table(rows);
}

}  // namespace notes
