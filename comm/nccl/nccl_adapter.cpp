// NCCL behind nccl_library.h: the only file that includes nccl.h.
//
// Communicators are made with blocking = 0: no call of NCCL waits for a peer,
// so a rank that never comes can be noticed, named, and the rest aborted.

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/nccl/nccl_library.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

ncclDataType_t nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ncclFloat64;
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI64:
      return ncclInt64;
    default:
      return ncclInt32;
  }
}

ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
    default:
      return ncclSum;
  }
}

// "NCCL: ncclSend of f32[10] to rank 1 failed: unhandled system error (...)".
template <typename... Parts>
void check(ncclResult_t result, ncclComm_t comm, const char* call,
           const Parts&... sizes) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  std::ostringstream text;
  text << "NCCL: " << call;
  ((text << sizes), ...);
  text << " failed: " << ncclGetErrorString(result);
  const char* more = ncclGetLastError(comm);
  if (more != nullptr && *more != '\0') text << " (" << more << ")";
  throw Error(text.str());
}

// " of f32[10] to rank 1".
std::string sizes_of(const NcclOperation& x) {
  const bool to = x.op == CommOp::kReduce || x.op == CommOp::kSend;
  const bool from = x.op == CommOp::kBroadcast || x.op == CommOp::kRecv;
  return " of " + std::string(dtype_name(x.dtype)) + "[" +
         std::to_string(x.count) + "]" +
         (to     ? " to rank " + std::to_string(x.peer)
          : from ? " from rank " + std::to_string(x.peer)
                 : "");
}

class Communicator : public NcclCommunicator {
 public:
  Communicator() = default;
  ~Communicator() override {
    if (comm_ == nullptr) return;
    // Nothing can be done about errors here, and a handle that is still being
    // made can only be aborted.
    finalize();
    while (is_finalized_ && state() == ncclInProgress) {
      std::this_thread::yield();
    }
    if (state() == ncclSuccess) {
      ncclCommDestroy(comm_);
    } else {
      ncclCommAbort(comm_);
    }
  }

  static ncclConfig_t config() {
    ncclConfig_t result = NCCL_CONFIG_INITIALIZER;
    result.blocking = 0;
    return result;
  }

  void join(const std::string& id, int size, int rank) {
    ncclUniqueId unique;
    SB_CHECK(id.size() == sizeof(unique), "NCCL: a unique id has ",
             sizeof(unique), " bytes, this one ", id.size());
    std::memcpy(&unique, id.data(), sizeof(unique));
    ncclConfig_t options = config();
    check(ncclCommInitRankConfig(&comm_, size, unique, rank, &options), comm_,
          "ncclCommInitRankConfig", " of rank ", rank, " of ", size);
  }

  bool is_ready() override {
    // A split returns its handle once the parent has accepted the call.
    if (parent_ != nullptr) {
      if (!parent_->is_ready()) return false;
      parent_ = nullptr;
    }
    SB_CHECK(comm_ != nullptr, "NCCL: the communicator was aborted");
    ncclResult_t result = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &result), comm_,
          "ncclCommGetAsyncError");
    check(result, comm_, "a call in flight");
    return result == ncclSuccess;
  }

  void call(const NcclOperation& x, void* to_stream) override {
    const auto stream = static_cast<cudaStream_t>(to_stream);
    const ncclDataType_t type = nccl_dtype(x.dtype);
    const ncclRedOp_t op = nccl_op(x.reduce_op);
    const auto checked = [&](const char* name, ncclResult_t result) {
      check(result, comm_, name, sizes_of(x));
    };
    switch (x.op) {
      case CommOp::kAllReduce:
        return checked(
            "ncclAllReduce",
            ncclAllReduce(x.input, x.output, x.count, type, op, comm_, stream));
      case CommOp::kReduceScatter:
        return checked("ncclReduceScatter",
                       ncclReduceScatter(x.input, x.output, x.count, type, op,
                                         comm_, stream));
      case CommOp::kAllGather:
        return checked(
            "ncclAllGather",
            ncclAllGather(x.input, x.output, x.count, type, comm_, stream));
      case CommOp::kBroadcast:
        return checked("ncclBroadcast",
                       ncclBroadcast(x.input, x.output, x.count, type, x.peer,
                                     comm_, stream));
      case CommOp::kReduce:
        return checked("ncclReduce",
                       ncclReduce(x.input, x.output, x.count, type, op, x.peer,
                                  comm_, stream));
      case CommOp::kSend:
        return checked("ncclSend",
                       ncclSend(x.input, x.count, type, x.peer, comm_, stream));
      case CommOp::kRecv:
        return checked("ncclRecv", ncclRecv(x.output, x.count, type, x.peer,
                                            comm_, stream));
      default:
        SB_FAIL("NCCL has no ", comm_op_name(x.op));
    }
  }

  std::shared_ptr<NcclCommunicator> split(int color, int key) override {
    auto child = std::make_shared<Communicator>();
    ncclConfig_t options = config();
    check(ncclCommSplit(comm_, color, key, &child->comm_, &options), comm_,
          "ncclCommSplit", " with color ", color, " and key ", key);
    child->parent_ = this;
    return child;
  }

  void finalize() override {
    if (comm_ == nullptr || is_finalized_ || state() != ncclSuccess) return;
    is_finalized_ = true;
    ncclCommFinalize(comm_);
  }
  void abort() override {
    if (comm_ != nullptr) ncclCommAbort(std::exchange(comm_, nullptr));
  }

 private:
  ncclResult_t state() const {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    return asked == ncclSuccess ? result : asked;
  }

  ncclComm_t comm_ = nullptr;
  bool is_finalized_ = false;
  // Set until the parent has accepted the split. The group that splits keeps
  // the parent alive until the child is ready.
  Communicator* parent_ = nullptr;
};

class Library : public NcclLibrary {
 public:
  Library() {
    // Connect rings and trees while communicators are made. If the first call
    // connected them, its host would wait for all ranks to call. Scatter,
    // gather and all_to_all still wait: NCCL connects pairs at their first
    // message, so all ranks must begin with them in one order.
    setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  }

  std::string make_id() override {
    ncclUniqueId id;
    check(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
    return {reinterpret_cast<const char*>(&id), sizeof(id)};
  }

  std::shared_ptr<NcclCommunicator> join(const std::string& id, int size,
                                         int rank) override {
    auto result = std::make_shared<Communicator>();
    result->join(id, size, rank);
    return result;
  }

  void begin_group() override {
    check(ncclGroupStart(), nullptr, "ncclGroupStart");
  }
  void end_group() override { check(ncclGroupEnd(), nullptr, "ncclGroupEnd"); }
};

}  // namespace
}  // namespace shardbook::internal

extern "C" shardbook::internal::NcclLibrary* shardbook_nccl() {
  static shardbook::internal::Library library;
  return &library;
}
