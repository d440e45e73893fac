// The stacks of a simulated world's ranks, as the address sanitizer sees them.

#include "sim/fiber_world.h"

#ifdef __SANITIZE_ADDRESS__
#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>

#include <cstddef>
#include <vector>

#include "comm/process_group.h"

namespace shardbook::sim {
namespace {

// The next mapping, such as a file, may reuse the memory.
TEST(FiberWorld, StacksAreGivenBackWithoutMarks) {
  std::vector<char*> frames(3);
  run_fibers(
      3,
      [&](ProcessGroup& group) {
        char here = 0;
        frames[static_cast<std::size_t>(group.rank())] = &here;
      },
      {}, /*on_meta=*/false);
  for (char* const frame : frames) {
    // The first frames of a fiber, at addresses above this one
    EXPECT_EQ(__asan_region_is_poisoned(frame, 4096), nullptr);
  }
}

}  // namespace
}  // namespace shardbook::sim
#endif
