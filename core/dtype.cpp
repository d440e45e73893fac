#include "core/dtype.h"

#include <array>

#include "core/check.h"

namespace shardbook {
namespace {

struct DTypeInfo {
  DType dtype;
  const char* name;
  std::size_t bytes;
};

constexpr std::array<DTypeInfo, 6> kDTypes = {{{DType::kF64, "f64", 8},
                                               {DType::kF32, "f32", 4},
                                               {DType::kBF16, "bf16", 2},
                                               {DType::kF16, "f16", 2},
                                               {DType::kI64, "i64", 8},
                                               {DType::kI32, "i32", 4}}};

}  // namespace

std::size_t dtype_bytes(DType dtype) {
  return kDTypes[static_cast<std::size_t>(dtype)].bytes;
}

const char* dtype_name(DType dtype) {
  return kDTypes[static_cast<std::size_t>(dtype)].name;
}

DType dtype_from_name(const std::string& name) {
  for (const DTypeInfo& info : kDTypes) {
    if (name == info.name) return info.dtype;
  }
  SB_FAIL("dtype '", name, "' is unknown; use f64, f32, bf16, f16, i64 or i32");
}

bool is_floating(DType dtype) {
  return dtype != DType::kI64 && dtype != DType::kI32;
}

}  // namespace shardbook
