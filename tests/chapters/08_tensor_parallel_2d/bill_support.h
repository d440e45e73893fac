#pragma once

// GPTs whose blocks are shared by squares and cubes of ranks; runs on squares.

#include <gtest/gtest.h>

#include <string>

#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {

/// Two layers whose sizes divide by 2, 3 and 4 twice.
inline Options gpt_options(int ranks, std::int64_t vocabulary,
                           std::int64_t batch) {
  Options options;
  options.world_size = ranks;
  options.model = R"({"vocab_size": )" + std::to_string(vocabulary) +
                  R"(, "n_positions": 24, "n_embd": 144, "n_layer": 2,)"
                  R"( "n_head": 12})";
  options.data = "random";
  options.backend = "sim";
  options.cluster = "textbook";
  options.steps = 3;
  options.batch = batch;
  options.seq = 20;
  return options;
}

/// A small GPT in f64: sizes divide for squares and cubes of 2 and 3, also in two
/// micro-batches, except the vocabulary, which divides by 2 only.
inline Options odd_gpt(double dropout) {
  Options options = sharded_test::small_gpt(1);
  options.model = R"({"vocab_size": 50, "n_positions": 8, "n_embd": 36,)"
                  R"( "n_layer": 2, "n_head": 6})";
  options.batch = 72;
  options.dropout = dropout;
  return options;
}

/// A small Llama in f64 whose sizes divide as those of odd_gpt: 12 heads of queries
/// and 6 of keys, 72 columns on a hidden size of 36, untied, with biases. Qwen3
/// has norms of heads, and no biases in the MLP.
inline Options odd_llama(const std::string& family) {
  Options options = sharded_test::small_gpt(1);
  options.model = R"({"vocab_size": 50, "max_position_embeddings": 8,)"
                  R"( "hidden_size": 36, "intermediate_size": 108,)"
                  R"( "num_hidden_layers": 2, "num_attention_heads": 12,)"
                  R"( "num_key_value_heads": 6, "head_dim": 6,)"
                  R"( "attention_bias": true, "model_type": ")" +
                  family + "\"" +
                  (family == "llama" ? R"(, "mlp_bias": true})" : "}");
  options.batch = 24;
  return options;
}

/// Trains on d squares of side q, and compares with one device.
inline Report on_squares(Options options, int q, int d,
                         const Passes& passes = {}) {
  options.world_size = d * q * q;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, summa_test::topology_of({q, d}));
    summa::SummaStrategy strategy(options, summa::grid_of(mesh), world, passes);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

}  // namespace shardbook::textbook
