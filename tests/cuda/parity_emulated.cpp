// Parity on the emulator: in order, backwards, and shuffled.

#include <cstdlib>

#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {

void choose_library() {
  static const bool once = [] {
    // Whoever starts the tests may choose another.
    setenv("SHARDBOOK_CUDA_LIBRARY", SHARDBOOK_EMULATED_LIBRARY,
           /*overwrite=*/0);
    return true;
  }();
  (void)once;
}

int num_orders() { return 3; }
void choose_order(int order) {
  emulator::set_seed(static_cast<std::uint64_t>(order));
}

}  // namespace shardbook::parity
