#pragma once

namespace emulator {
/// Forgets the shared arrays of the block before.
void begin_shared_memory();
}  // namespace emulator
