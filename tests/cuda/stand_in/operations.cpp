// NCCL's operations, each one call of the stand-in.

#include <nccl.h>

#include "tests/cuda/stand_in/communicator.h"

using stand_in::call;
using stand_in::Kind;

ncclResult_t ncclAllReduce(const void* input, void* output, std::size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kAllReduce, input, output, count, type, op});
}

ncclResult_t ncclReduceScatter(const void* input, void* output,
                               std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kReduceScatter, input, output, count, type, op});
}

ncclResult_t ncclAllGather(const void* input, void* output, std::size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kAllGather, input, output, count, type});
}

ncclResult_t ncclBroadcast(const void* input, void* output, std::size_t count,
                           ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kBroadcast, input, output, count, type, ncclSum, root});
}

ncclResult_t ncclReduce(const void* input, void* output, std::size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kReduce, input, output, count, type, op, root});
}

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kSend, data, nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, comm, stream,
              {Kind::kRecv, nullptr, data, count, type, ncclSum, peer});
}
