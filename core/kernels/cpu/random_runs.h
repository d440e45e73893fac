#pragma once

// Random bits in runs. Read by core/kernels/*.cpp only.

#include <cstdint>

#include "core/kernels/loops.h"
#include "core/kernels/random.h"

namespace shardbook::kernels::cpu {

/// words[i] = random_bits(key, first + i * step) for i < n.
void random_run(RandomKey key, std::uint64_t first, std::uint64_t step,
                std::int64_t n, std::uint32_t* words);

using kernels::keep_threshold;

}  // namespace shardbook::kernels::cpu
