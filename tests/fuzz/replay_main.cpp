// Runs a fuzzer without libFuzzer, so that every compiler and every sanitizer
// exercises it.
//
//   safetensors_replay                    seeds, and 100000 mutations of them
//   safetensors_replay --runs 1000000
//   safetensors_replay --write-seeds DIR  a first corpus for libFuzzer
//   safetensors_replay FILE...            replays what a fuzzer has found
//
// The mutations are the same in every run: a failure can be repeated.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"

namespace {

using Random = std::mt19937_64;

constexpr std::size_t kMaxBytes = 4096;

std::size_t below(Random& random, std::size_t limit) {
  return limit == 0 ? 0 : random() % limit;
}

/// Words that parsers trip over.
const std::vector<std::string>& dictionary() {
  static const std::vector<std::string> words = {
      "0",       "1",    "-1", "8",    "9223372036854775807",
      "1e9",     "null", "[",  "]",    "18446744073709551616",
      "{",       "}",    "\"", ",",    ":",
      "\\u0000", "\xff", " ",  "true", std::string(1, '\0')};
  return words;
}

std::string mutate(std::string text, const std::string& other, Random& random) {
  const std::size_t at = below(random, text.size() + 1);
  const std::size_t length = below(random, 16) + 1;
  switch (random() % 8) {
    case 0:  // flip a bit
      if (at < text.size()) text[at] ^= static_cast<char>(1 << random() % 8);
      break;
    case 1:  // replace a byte
      if (at < text.size()) text[at] = static_cast<char>(random());
      break;
    case 2:  // remove some
      text.erase(at, length);
      break;
    case 3:  // repeat some
      text.insert(at, text.substr(below(random, text.size()), length));
      break;
    case 4:  // insert a word
      text.insert(at, dictionary()[below(random, dictionary().size())]);
      break;
    case 5: {  // replace a number by a word
      const std::size_t digit = text.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const std::size_t end = text.find_first_not_of("0123456789", digit);
      const std::size_t count = end == std::string::npos ? end : end - digit;
      text.replace(digit, count,
                   dictionary()[below(random, dictionary().size())]);
      break;
    }
    case 6:  // cut short
      text.resize(at);
      break;
    default:  // continue with another input
      text = text.substr(0, at) + other.substr(below(random, other.size()));
  }
  if (text.size() > kMaxBytes) text.resize(kMaxBytes);
  return text;
}

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()),
                         input.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> pool = shardbook::fuzz_seeds();
  long runs = 100000;
  bool replayed = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--runs" && i + 1 < argc) {
      runs = std::atol(argv[++i]);
    } else if (argument == "--write-seeds" && i + 1 < argc) {
      const std::string folder = argv[++i];
      for (std::size_t seed = 0; seed < pool.size(); ++seed) {
        std::ofstream(folder + "/seed-" + std::to_string(seed),
                      std::ios::binary)
            << pool[seed];
      }
      return 0;
    } else {
      std::ifstream file(argument, std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "%s: cannot open\n", argument.c_str());
        return 2;
      }
      run(std::string(std::istreambuf_iterator<char>(file), {}));
      replayed = true;
    }
  }
  if (replayed) return 0;

  for (const std::string& seed : pool) run(seed);
  // Mutants join the pool, so that changes add up.
  constexpr std::size_t kMaxPool = 2000;
  const std::size_t num_seeds = pool.size();
  pool.reserve(kMaxPool + num_seeds);  // what is referred to stays in place
  Random random(20240229);
  for (long i = 0; i < runs; ++i) {
    const std::string& base = pool[below(random, pool.size())];
    const std::string& other = pool[below(random, pool.size())];
    std::string mutant = mutate(base, other, random);
    run(mutant);
    if (pool.size() < kMaxPool) {
      pool.push_back(std::move(mutant));
    } else {
      pool[num_seeds + below(random, kMaxPool - num_seeds)] = std::move(mutant);
    }
    // Keep some inputs close to the seeds.
    if (i % 4 == 0) run(mutate(pool[below(random, num_seeds)], other, random));
  }
  std::printf("%zu seeds and %ld mutations: no crash\n", num_seeds, runs);
  return 0;
}
