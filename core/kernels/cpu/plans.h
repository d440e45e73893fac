#pragma once

// A cache of oneDNN primitives. Read by core/kernels/*.cpp only.

#include <array>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/kernel_order.h"

namespace shardbook {

struct KernelContext::Plans {
  /// A primitive and the scratch it needs.
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

  /// The plan of `known` for `key`, which make() creates at the first use. A
  /// plan without a primitive remembers that oneDNN has none.
  template <typename AnyPlan, typename Make>
  static const AnyPlan& find_or_make(const char* op,
                                     std::map<Key, AnyPlan>& known,
                                     const Key& key, const Make& make) {
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    AnyPlan plan;
    try {
      plan = make();
    } catch (const dnnl::error& error) {
      SB_CHECK(error.status == dnnl_unimplemented, op,
               ": oneDNN: ", error.what());
    }
    return known.emplace(key, std::move(plan)).first->second;
  }
  static dnnl::memory::data_type type_of(DType dtype) {
    return dtype == DType::kF32 ? dnnl::memory::data_type::f32
                                : dnnl::memory::data_type::bf16;
  }
};

}  // namespace shardbook
