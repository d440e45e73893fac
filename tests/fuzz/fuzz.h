#pragma once

// What a fuzzer of a parser consists of. libFuzzer drives it where the
// compiler has it; replay_main.cpp drives it everywhere.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/check.h"

/// Feeds one input to the parser. Returns 0; aborts when a promise is broken.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size);

namespace shardbook {

/// Inputs to start from: valid ones, and ones that are nearly so.
std::vector<std::string> fuzz_seeds();

inline void promise(bool kept) {
  if (!kept) std::abort();
}

/// What the fuzzers of texts call their input.
inline const std::string kFuzzedInput = "fuzzed-input";

/// An error message begins as it should, and can be read.
inline void check_message(const std::string& message, const std::string& start,
                          std::size_t max_size = 1000) {
  promise(message.rfind(start, 0) == 0);
  promise(message.size() < max_size);
  for (const char c : message) promise(c >= 0x20 && c < 0x7f);
}

/// Calls `read`, which may refuse its input with a message that names it.
template <typename Read>
void read_or_refuse(const Read& read, std::size_t max_size = 1000,
                    const std::string& start = kFuzzedInput) {
  try {
    read();
  } catch (const Error& error) {
    check_message(error.what(), start, max_size);
  }
}

inline std::string text_of(const std::uint8_t* data, std::size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

}  // namespace shardbook
