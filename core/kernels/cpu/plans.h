#pragma once

// The primitives of oneDNN that are kept. Read by core/kernels/*.cpp only.

#include <array>
#include <cstdint>
#include <dnnl.hpp>
#include <map>

#include "core/kernels/kernel_context.h"
#include "core/kernels/kernel_order.h"

namespace shardbook {

struct KernelContext::Plans {
  /// A primitive and the scratch it asks for.
  struct Plan {
    dnnl::primitive primitive;
    dnnl::memory::desc a, b, c, bias, scratch;
  };
  /// A convolution. Where the primitive prefers another layout of the weight
  /// than ours, `reorder` converts it, and `order` is that layout.
  struct ConvPlan {
    dnnl::primitive primitive, reorder;
    dnnl::memory::desc x, y, weight, own_weight, bias, scratch;
    SharedKernelOrder order;
  };
  /// Everything that shapes a primitive, threads included.
  using Key = std::array<std::int64_t, 14>;

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Key, Plan> matmuls;
  std::map<Key, ConvPlan> convolutions;
};

}  // namespace shardbook
