#include "tests/cuda/emulator/order.h"

#include <atomic>
#include <numeric>

#include "tests/cuda/emulator/emulator.h"

namespace emulator {
namespace {

std::atomic<std::uint64_t> the_seed{0};
std::uint64_t state = 1;

}  // namespace

void set_seed(std::uint64_t seed) {
  the_seed = seed;
  state = seed * 0x9E3779B97F4A7C15ull + 1;
}
std::uint64_t seed() { return the_seed.load(std::memory_order_relaxed); }

std::uint64_t random_below(std::uint64_t n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (state >> 11) % n;
}

Permutation::Permutation(std::uint64_t n) : n_(n) {
  if (n < 2) return;
  if (seed() == 1) {
    first_ = n - 1, step_ = n - 1;
  } else if (seed() > 1) {
    first_ = random_below(n);
    do {
      step_ = 1 + random_below(n - 1);
    } while (std::gcd(step_, n) != 1);
  }
}

}  // namespace emulator
