#pragma once

// How tests make the stand-in for NCCL fail, and what it counts.

#include <nccl.h>

#include <cstdint>
#include <string>

namespace stand_in {

/// The `nth` call from now of this function ("ncclAllReduce") by any rank
/// returns `error` and does nothing.
void fail_call(const std::string& function, int nth = 1,
               ncclResult_t error = ncclSystemError);
/// From now on the communicators of this device report a lost connection.
void fail_async(int device, const std::string& text);
/// Forgets planted failures.
void reset();

/// Communicators that were made by ncclCommInitRankConfig and ncclCommSplit,
/// and that were aborted, since the program began.
struct Counts {
  std::int64_t joined = 0, split = 0, aborted = 0;
  std::int64_t live = 0;  ///< neither destroyed nor aborted
};
Counts counts();

}  // namespace stand_in
