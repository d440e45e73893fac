#pragma once

// A GPT whose blocks squares and cubes of ranks share, for runs on shapes.

#include <gtest/gtest.h>

#include <string>

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

}  // namespace shardbook::textbook
