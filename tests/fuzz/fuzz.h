#pragma once

// What a fuzzer of a parser consists of. libFuzzer drives it where the
// compiler has it; replay_main.cpp drives it everywhere.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Feeds one input to the parser. Returns 0; aborts when a promise is broken.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size);

namespace shardbook {

/// Inputs to start from: valid ones, and ones that are nearly so.
std::vector<std::string> fuzz_seeds();

}  // namespace shardbook
