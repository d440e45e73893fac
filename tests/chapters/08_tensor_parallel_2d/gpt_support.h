#pragma once

// A GPT in parts against one on one device, step by step.

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/sharded/parts.h"
#include "core/optim.h"
#include "core/shards.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"
#include "tests/support/larger.h"

namespace shardbook::summa_test {

/// Sizes that divide for squares of 2 and 3 and cubes of 2, except the
/// vocabulary, which divides by 2 only.
inline ModelConfig small_gpt(double dropout) {
  ModelConfig config{"gpt2", 50, 8, 36, 2, 6};
  config.dropout = dropout;
  return config;
}

struct GptParts {
  LayerFactory layers;
  std::function<Shards(const std::string& name)> layout;
  std::int64_t padded_vocabulary = 0;
};

/// Trains both for `steps` steps of AdamW. Returns the largest difference of
/// the losses and of this rank's parameters.
inline double gpt_difference(const GptParts& parts, DType dtype, int steps,
                             double dropout, bool recompute = false) {
  const ModelConfig config = small_gpt(dropout);
  ModelConfig padded = config;
  padded.vocab_size = parts.padded_vocabulary;
  InitOptions init;
  init.seed = 5;
  init.dtype = dtype;
  Gpt whole(config, init), split(padded, init, parts.layers);
  set_recompute(split, recompute);
  OptimizerOptions options;
  options.lr = 1e-2;
  const auto whole_optimizer =
      make_optimizer("adamw", whole.parameters(), options);
  const auto split_optimizer =
      make_optimizer("adamw", split.parameters(), options);
  double largest = 0;
  for (int step = 0; step < steps; ++step) {
    const Tensor tokens = drawn_ids({12, 6 + step % 2}, config.vocab_size);
    const Shape shape = {12, 6 + step % 2};
    const Tensor targets =
        step == 1 ? uneven_targets(shape, 47) : drawn_ids(shape, 47);
    const RandomState random{7, static_cast<std::uint64_t>(step), 0, {0, 1}};
    RankContext::current().random = random;
    const Tensor expected = language_loss(whole(tokens), targets);
    expected.backward();
    RankContext::current().random = random;
    const Tensor loss = parts.layers.loss(split(tokens), targets);
    loss.backward();
    largest = larger(largest, std::abs(loss.item() - expected.item()));
    for (Optimizer* each : {whole_optimizer.get(), split_optimizer.get()}) {
      each->step();
    }
    whole.clear_grad();
    split.clear_grad();
  }
  const auto mine = split.named_parameters();
  const auto theirs = whole.named_parameters();
  EXPECT_EQ(mine.size(), theirs.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_EQ(mine[i].name, theirs[i].name);
    const NoGrad no_grad;
    Tensor expected = theirs[i].tensor.detach();
    if (mine[i].name == "transformer.wte.weight" &&
        padded.vocab_size > config.vocab_size) {
      // Padding keeps its initial values
      Tensor table =
          make_parameter("transformer.wte.weight",
                         {padded.vocab_size, config.n_embd}, 0.02, init);
      table.rows_view(0, config.vocab_size).copy_from(expected);
      expected = table.detach();
    }
    largest = larger(
        largest,
        max_abs_difference(mine[i].tensor.detach(),
                           take_part(expected, parts.layout(mine[i].name))));
  }
  return largest;
}

/// A GPT in blocks on a grid.
inline GptParts parts_on(const Grid& grid) {
  const std::int64_t vocabulary = small_gpt(0).vocab_size;
  return {summa::layers(grid, vocabulary),
          [&grid](const std::string& name) {
            return summa::layout(name, grid.place());
          },
          padded_vocabulary(vocabulary, grid.q())};
}

// AdamW divides gradients by their size, so rounding errors in a gradient near
// zero move a parameter by up to lr.
constexpr double kTrainedF64 = 1e-9;

}  // namespace shardbook::summa_test
