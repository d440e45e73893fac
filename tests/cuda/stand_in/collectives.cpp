// The arithmetic of the stand-in for NCCL.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tests/cuda/stand_in/communicator.h"

namespace stand_in {
namespace {

// 16 bits are widened for each operation, and rounded after it.
template <typename T>
T apply(T a, T b, ncclRedOp_t op) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
  const Wide x = a, y = b;
  return op == ncclSum   ? x + y
         : op == ncclMax ? std::max(x, y)
                         : std::min(x, y);
}

// Element `i` of the sum of all inputs.
template <typename T>
T reduced(const std::vector<Operation*>& ranks, std::size_t i,
          std::size_t total) {
  const std::size_t first = (i * ranks.size() / total + 1) % ranks.size();
  const auto element = [&](std::size_t step) {
    const Operation& from = *ranks[(first + step) % ranks.size()];
    return static_cast<const T*>(from.input)[i];
  };
  T result = element(0);
  for (std::size_t step = 1; step < ranks.size(); ++step) {
    result = apply(result, element(step), ranks[0]->op);
  }
  return result;
}

template <typename T>
void reduce(const std::vector<Operation*>& ranks) {
  const Operation& first = *ranks[0];
  const bool is_scatter = first.kind == Kind::kReduceScatter;
  const std::size_t total = first.count * (is_scatter ? ranks.size() : 1);
  std::vector<T> sums(total);
  for (std::size_t i = 0; i < total; ++i) {
    sums[i] = reduced<T>(ranks, i, total);
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (first.kind == Kind::kReduce && static_cast<int>(r) != first.peer) {
      continue;
    }
    const T* from = sums.data() + (is_scatter ? r * first.count : 0);
    std::memcpy(ranks[r]->output, from, first.count * sizeof(T));
  }
}

void copy(const std::vector<Operation*>& ranks) {
  const Operation& first = *ranks[0];
  const std::size_t bytes = first.count * size_of(first.type);
  if (first.kind == Kind::kBroadcast) {
    const Operation& root = *ranks[static_cast<std::size_t>(first.peer)];
    const std::vector<char> data(static_cast<const char*>(root.input),
                                 static_cast<const char*>(root.input) + bytes);
    for (Operation* rank : ranks) {
      std::memcpy(rank->output, data.data(), bytes);
    }
    return;
  }
  std::vector<char> data(bytes * ranks.size());  // all_gather
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::memcpy(data.data() + r * bytes, ranks[r]->input, bytes);
  }
  for (Operation* rank : ranks) {
    std::memcpy(rank->output, data.data(), data.size());
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 4;
  }
}

void run_collective(const std::vector<Operation*>& ranks) {
  const Operation& first = *ranks[0];
  if (first.kind == Kind::kAllGather || first.kind == Kind::kBroadcast) {
    return copy(ranks);
  }
  switch (first.type) {
    case ncclFloat64:
      return reduce<double>(ranks);
    case ncclFloat32:
      return reduce<float>(ranks);
    case ncclFloat16:
      return reduce<__half>(ranks);
    case ncclBfloat16:
      return reduce<__nv_bfloat16>(ranks);
    case ncclInt64:
      return reduce<std::int64_t>(ranks);
    default:
      return reduce<std::int32_t>(ranks);
  }
}

}  // namespace stand_in
