#pragma once

// One rank's end of a communicator of the stand-in, and its calls.

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace stand_in {

enum class Kind {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kSend,
  kRecv
};

/// One call of one rank.
struct Operation {
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int peer = -1;  ///< root, receiver or sender
  bool is_message() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  /// What must be the same on all ranks: "ncclAllReduce f32[10] (sum)".
  std::string text() const;
  // These change while the call runs.
  bool has_arrived = false;
  bool is_done = false;
  std::int64_t number = 0;  ///< among the rank's collectives, or of its way
};

/// What one rank puts on a stream at once: a call, or the calls of a group.
struct Launch {
  cudaStream_t stream = nullptr;
  std::vector<Operation> operations;
  bool is_done = false;
};

/// Moves the data of a collective that all ranks have arrived in. Sums go
/// around a ring, beginning at another rank in each part of the buffer, and
/// 16-bit sums are rounded at every step, as NCCL's may be.
void run_collective(const std::vector<Operation*>& by_rank);
std::size_t size_of(ncclDataType_t type);

/// Gives `operation` to the stream, or to the group that was started. `function`
/// is the name under which its failure can be planted.
ncclResult_t call(const char* function, ncclComm_t comm, cudaStream_t stream,
                  Operation operation);

}  // namespace stand_in

struct ncclComm {
  std::string id;
  int rank = 0, size = 0;
  int device = 0;
  bool is_aborted = false, is_finalized = false;
  ncclResult_t error = ncclSuccess;
  std::string error_text;
  // Waits for the question how it is going, and after that reaches its stream.
  std::shared_ptr<stand_in::Launch> pending;
  bool was_asked = false;
  bool is_complete = false;
  ncclComm_t* child = nullptr;  ///< of a split that not all ranks have called
  std::int64_t num_collectives = 0, num_splits = 0, num_running = 0;
  std::map<std::pair<int, int>, std::int64_t> num_messages;  // by way
};
