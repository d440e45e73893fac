// The tests of core's operations once more, with a GPU as the rank's device: the
// emulated one, or a real one where SHARDBOOK_CUDA_LIBRARY names its library.
//
// Under the emulator an operation that reads a GPU's memory on the host crashes,
// and one that forgets to wait reads old values.

#include <gtest/gtest.h>

#include <cstdlib>

#include "core/context.h"

int main(int argc, char** argv) {
  // Errors that kernels find, which a GPU reports at the next wait; and what
  // cuBLASLt does not promise (core/kernels/matmul.h). A filter on the command
  // line replaces this one.
  testing::GTEST_FLAG(filter) =
      "-*Refuses*:*AreRefused*:Embedding.TakesBothKindsOfIndices:"
      "DeterministicMode.LinearLayersAreCutAnywhere";
  testing::InitGoogleTest(&argc, argv);
  setenv("SHARDBOOK_CUDA_LIBRARY", SHARDBOOK_EMULATED_LIBRARY,
         /*overwrite=*/0);
  shardbook::RankContext context(shardbook::Device::cuda());
  const shardbook::RankContext::Scope scope(context);
  return RUN_ALL_TESTS();
}
