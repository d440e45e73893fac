#pragma once

#include <cstddef>

namespace shardbook::pipeline {

/// A rank, a chunk or a micro-batch as an index of a vector.
inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace shardbook::pipeline
