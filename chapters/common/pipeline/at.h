#pragma once

#include <cstddef>

namespace shardbook::pipeline {

/// Converts a rank, a chunk or a micro-batch to an index of a vector.
inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace shardbook::pipeline
