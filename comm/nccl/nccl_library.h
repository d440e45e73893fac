#pragma once

// The part of NCCL that comm uses.
//
// comm is built without CUDA and NCCL. Only a separate shared library,
// libshardbook_nccl.so (nccl_adapter.cpp), calls them; it is loaded when the
// first world of backend "nccl" begins. SHARDBOOK_NCCL_LIBRARY names another
// one: the tests load a build of the same adapter on a stand-in for NCCL that
// works on host memory.

#include <cstddef>
#include <memory>
#include <string>

#include "comm/process_group.h"
#include "core/dtype.h"

namespace shardbook::internal {

/// The arguments of one NCCL call. `op` is one of the collectives that NCCL
/// has, a send or a receive.
struct NcclOperation {
  CommOp op;
  const void* input = nullptr;  ///< null for a receive
  void* output = nullptr;       ///< null for a send
  /// Elements of the output of reduce_scatter, and of the input of all_gather:
  /// the other buffer has that many per rank.
  std::size_t count = 0;
  DType dtype = DType::kF32;
  ReduceOp reduce_op = ReduceOp::kSum;
  int peer = -1;  ///< root, receiver or sender
};

/// One rank's end of a communicator. Buffers lie on the current device of the
/// calling thread, streams are cudaStream_t. For one thread at a time.
class NcclCommunicator {
 public:
  /// Waits for the calls on its streams, unless it was aborted.
  virtual ~NcclCommunicator() = default;

  /// True when NCCL has accepted all calls. Throws the error of a call that
  /// failed after it returned, such as a lost connection.
  virtual bool is_ready() = 0;
  /// Returns before the device has run the call, and perhaps before NCCL has
  /// put it on the stream: the next call, or an event after it, has to wait
  /// until is_ready(). Throws Error, with the call's sizes and NCCL's message,
  /// where NCCL refuses the call.
  virtual void call(const NcclOperation& operation, void* stream) = 0;

  /// A communicator per color, ranked by key; all ranks of this one call it.
  virtual std::shared_ptr<NcclCommunicator> split(int color, int key) = 0;
  /// Begins to end the communicator. NCCL destroys one only when all its ranks
  /// do, and ranks may hold their communicators in different orders: finalize
  /// all of them, then destroy them.
  virtual void finalize() = 0;
  /// Ends all calls that run or wait on the device. No call may follow. Aborts
  /// between begin_group and end_group happen all at once.
  virtual void abort() = 0;
};

class NcclLibrary {
 public:
  virtual ~NcclLibrary() = default;
  /// The id that all ranks of a new communicator pass to `join`.
  virtual std::string make_id() = 0;
  /// Rank `rank` of `size` joins, on the current device of this thread; done
  /// when the communicator is ready.
  virtual std::shared_ptr<NcclCommunicator> join(const std::string& id,
                                                 int size, int rank) = 0;
  /// Sends and receives of this thread between the two start together, in
  /// whatever order they were given.
  virtual void begin_group() = 0;
  virtual void end_group() = 0;
};

/// Loads the library at the first call. Throws Error with the reason where
/// there is none.
NcclLibrary& nccl_library();
/// Why nccl_library() would throw; empty where it would not.
std::string why_no_nccl();

}  // namespace shardbook::internal
