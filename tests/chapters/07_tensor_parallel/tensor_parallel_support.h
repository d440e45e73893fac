#pragma once

// Values and logs for the tests of this chapter.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "tests/core/support.h"
#include "tests/support/on_ranks.h"

namespace shardbook::tensor_parallel {

inline void expect_near(const Tensor& found, const Tensor& expected,
                        double tolerance = 1e-12) {
  EXPECT_LT(max_abs_difference(found, expected), tolerance);
}

/// "all_reduce 192", ...
using Log = std::vector<std::string>;
inline Log log_of(const std::vector<CommRecord>& records) {
  Log log;
  for (const CommRecord& record : records) {
    log.push_back(comm_op_name(record.op) +
                  (" " + std::to_string(record.numel)));
  }
  return log;
}

}  // namespace shardbook::tensor_parallel
