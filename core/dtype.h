#pragma once

// Element types. f64 is for proofs, f32 for training, bf16 and f16 for mixed
// precision, i64 and i32 for indices.

#include <cstddef>
#include <cstdint>
#include <string>

namespace shardbook {

enum class DType { kF64, kF32, kBF16, kF16, kI64, kI32 };

/// Bytes of one element.
std::size_t dtype_bytes(DType dtype);
/// "f64", "f32", "bf16", "f16", "i64", "i32".
const char* dtype_name(DType dtype);
/// Inverse of dtype_name; throws Error that lists the names.
DType dtype_from_name(const std::string& name);
bool is_floating(DType dtype);

}  // namespace shardbook
