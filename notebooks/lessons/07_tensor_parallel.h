#pragma once

// What the notebook 07_tensor_parallel calls: matrices and their parts, runs on
// ranks and on shapes, and tables of their results.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/programs/programs.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

/// A matrix of which t ranks hold equal parts along `dim`.
inline dtensor::Held cut_of(const std::string& name, const Shape& shape,
                            std::int64_t dim, int t) {
  return dtensor::held_by(name, shape, {dtensor::shard(dim)}, {t});
}

/// A parameter of a GPT as the chapter's layers cut it.
inline dtensor::Held parameter_of(const std::string& name, const Shape& shape,
                                  int t) {
  return dtensor::held_by(name, shape, t, [&](int rank) {
    return tensor_parallel::layout(ModelConfig(), name, rank, t);
  });
}

/// Normal numbers that depend on the name alone.
inline Tensor random(const std::string& name, const Shape& shape) {
  return numbers(shape, name, /*mean=*/0, /*seed=*/0);
}

/// This rank's equal part along `dim`.
inline Tensor part_of(const Tensor& whole, std::int64_t dim,
                      ProcessGroup& world) {
  return take_part(whole, {{dim, world.rank(), world.size()}});
}

inline std::string difference(const Tensor& a, const Tensor& b) {
  const double value = max_abs_difference(a, b);
  return value < 1e-12 ? "less than 1e-12" : fixed(value, 2);
}

/// One number of each rank, in columns with titles.
inline Picture by_rank(const std::vector<std::string>& titles,
                       const std::vector<std::vector<double>>& columns) {
  std::vector<std::vector<double>> ranks(columns[0].size());
  for (const std::vector<double>& column : columns) {
    for (std::size_t i = 0; i < ranks.size(); ++i)
      ranks[i].push_back(column[i]);
  }
  return notebook::by_rank(titles, ranks, 0);
}

/// Ranks on threads train the smallest GPT.
inline const std::string kSmall =
    " --model gpt-nano --data walk --batch 8 --seq 32 --steps 8";
/// A GPT of 1.3 billion parameters on the shapes of machines of eight A100.
inline const std::string kLarge =
    " --backend sim --cluster selene --model gpt-1.3b --dtype bf16 "
    "--data random --batch 8 --seq 1024 --steps 2";

inline Report train(int t, const std::string& options) {
  return run(joined("07_tensor_parallel --world-size ", t, options));
}

/// A bar for each number of ranks.
inline Picture sweep(const std::vector<int>& sizes) {
  std::vector<Bar> all;
  for (const int t : sizes) {
    const Report report = train(t, kLarge);
    all.push_back({joined("t = ", t), report.time.step_s, 0,
                   ms(report.time.step_s, 1) + ", " +
                       fixed(report.ranks[0].peak_total.counted / 1e9, 1) +
                       " GB"});
  }
  return bars("Beyond eight ranks, twice as many gain little", all,
              {"ms", 1e-3});
}

/// The exposed share of a step on 8 ranks of `textbook`, by width and samples.
inline Picture exposed_shares(const std::vector<int>& widths,
                              const std::vector<int>& samples) {
  Rows lines = {{"width"}};
  for (const int batch : samples) {
    lines[0].push_back(joined(1024 * batch, " tokens"));
  }
  for (const int width : widths) {
    lines.push_back({std::to_string(width)});
    for (const int batch : samples) {
      const Report report = train(
          8, joined(kLarge, " --cluster textbook --dtype f32 --batch ", batch,
                    R"( --model '{"n_layer": 24, "n_head": 32, )"
                    R"("vocab_size": 50304, "n_positions": 2048, "n_embd": )",
                    width, "}'"));
      lines.back().push_back(
          fixed(100 * report.time.exposed_comm_s / report.time.step_s, 0) +
          " %");
    }
  }
  return table(lines);
}

/// Bytes of the ledger for the all-reduces of the blocks of the large model on
/// eight ranks: all of a step but token table, head, loss and norm.
inline double bytes_of_blocks() {
  const double all = train(8, kLarge).ranks[0].bytes.counted / 2;  // steps
  const double ring = 2.0 * 7 / 8;
  const double activations = ring * 8 * 1024 * 2048 * 2;
  const double loss = 3 * ring * 8 * 1024 * 4;
  const double norm = ring * 8;
  return all - 2 * activations - loss - norm;
}

}  // namespace notes
