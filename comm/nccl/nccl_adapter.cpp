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

cudaStream_t nccl_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
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

std::string of(std::size_t count, DType dtype) {
  return " of " + std::string(dtype_name(dtype)) + "[" + std::to_string(count) +
         "]";
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
    // A split gives its handle when the parent has taken the call.
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

  void all_reduce(const void* input, void* output, std::size_t count,
                  DType dtype, ReduceOp op, void* stream) override {
    check(ncclAllReduce(input, output, count, nccl_dtype(dtype), nccl_op(op),
                        comm_, nccl_stream(stream)),
          comm_, "ncclAllReduce", of(count, dtype));
  }

  void reduce_scatter(const void* input, void* output, std::size_t count,
                      DType dtype, ReduceOp op, void* stream) override {
    check(ncclReduceScatter(input, output, count, nccl_dtype(dtype),
                            nccl_op(op), comm_, nccl_stream(stream)),
          comm_, "ncclReduceScatter", of(count, dtype));
  }

  void all_gather(const void* input, void* output, std::size_t count,
                  DType dtype, void* stream) override {
    check(ncclAllGather(input, output, count, nccl_dtype(dtype), comm_,
                        nccl_stream(stream)),
          comm_, "ncclAllGather", of(count, dtype));
  }

  void broadcast(void* data, std::size_t count, DType dtype, int root,
                 void* stream) override {
    check(ncclBroadcast(data, data, count, nccl_dtype(dtype), root, comm_,
                        nccl_stream(stream)),
          comm_, "ncclBroadcast", of(count, dtype), " from rank ", root);
  }

  void reduce(void* data, std::size_t count, DType dtype, ReduceOp op, int root,
              void* stream) override {
    check(ncclReduce(data, data, count, nccl_dtype(dtype), nccl_op(op), root,
                     comm_, nccl_stream(stream)),
          comm_, "ncclReduce", of(count, dtype), " to rank ", root);
  }

  void send(const void* data, std::size_t count, DType dtype, int peer,
            void* stream) override {
    check(ncclSend(data, count, nccl_dtype(dtype), peer, comm_,
                   nccl_stream(stream)),
          comm_, "ncclSend", of(count, dtype), " to rank ", peer);
  }

  void recv(void* data, std::size_t count, DType dtype, int peer,
            void* stream) override {
    check(ncclRecv(data, count, nccl_dtype(dtype), peer, comm_,
                   nccl_stream(stream)),
          comm_, "ncclRecv", of(count, dtype), " from rank ", peer);
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
  // Of a split that the parent has not taken yet. The group that splits keeps
  // the parent alive until the child is ready.
  Communicator* parent_ = nullptr;
};

class Library : public NcclLibrary {
 public:
  Library() {
    // Connect rings and trees while communicators are made. A first call that
    // connects makes its host wait for the others' first call. Scatter, gather
    // and all_to_all still do: NCCL connects pairs at their first message, so
    // all ranks must begin with them in one order.
    setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  }

  std::string version() const override {
    int code = 0;
    check(ncclGetVersion(&code), nullptr, "ncclGetVersion");
    return "NCCL " + std::to_string(code / 10000) + "." +
           std::to_string(code / 100 % 100) + "." + std::to_string(code % 100);
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
