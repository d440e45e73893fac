#pragma once

// Orders that a seed chooses.

#include <cstdint>

namespace emulator {

/// A number in [0, n), for 0 < n.
std::uint64_t random_below(std::uint64_t n);

/// All of 0 .. n - 1, in an order that the seed chooses.
class Permutation {
 public:
  explicit Permutation(std::uint64_t n);
  std::uint64_t operator()(std::uint64_t k) const {
    return (first_ + k % n_ * step_) % n_;
  }

 private:
  std::uint64_t n_, first_ = 0, step_ = 1;
};

}  // namespace emulator
