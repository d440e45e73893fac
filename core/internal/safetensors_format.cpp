#include "core/internal/safetensors_format.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "core/check.h"

namespace shardbook::internal {
namespace {

struct TypeInfo {
  const char* name;
  int bits;
  bool supported;
  DType dtype;
};

// Types that we do not compute with still have a size, which is checked.
constexpr DType kNone = DType::kF32;
constexpr std::array<TypeInfo, 22> kTypes = {{
    {"F64", 64, true, DType::kF64},   {"F32", 32, true, DType::kF32},
    {"BF16", 16, true, DType::kBF16}, {"F16", 16, true, DType::kF16},
    {"I64", 64, true, DType::kI64},   {"I32", 32, true, DType::kI32},
    {"BOOL", 8, false, kNone},        {"U8", 8, false, kNone},
    {"I8", 8, false, kNone},          {"I16", 16, false, kNone},
    {"U16", 16, false, kNone},        {"U32", 32, false, kNone},
    {"U64", 64, false, kNone},        {"C64", 64, false, kNone},
    {"F8_E5M2", 8, false, kNone},     {"F8_E4M3", 8, false, kNone},
    {"F8_E5M2FNUZ", 8, false, kNone}, {"F8_E4M3FNUZ", 8, false, kNone},
    {"F8_E8M0", 8, false, kNone},     {"F6_E2M3", 6, false, kNone},
    {"F6_E3M2", 6, false, kNone},     {"F4", 4, false, kNone},
}};

constexpr std::size_t kMaxQuotedChars = 100;
constexpr std::size_t kMaxShownDims = 8;

}  // namespace

const char* safetensors_type_name(DType dtype) {
  for (const TypeInfo& info : kTypes) {
    if (info.supported && info.dtype == dtype) return info.name;
  }
  SB_FAIL("safetensors: element type ", static_cast<int>(dtype),
          " has no name in the format");
}

int resolve_safetensors_type(SafetensorsEntry* entry) {
  entry->supported = false;
  for (const TypeInfo& info : kTypes) {
    if (entry->type_name == info.name) {
      entry->dtype = info.dtype;
      entry->supported = info.supported;
      return info.bits;
    }
  }
  return 0;
}

std::int64_t safetensors_bytes(const std::vector<std::int64_t>& shape,
                               int element_bits) {
  // `volume` treats 0 as 1: overflow must not depend on the order of
  // dimensions.
  std::int64_t volume = element_bits;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return -1;
    empty = empty || size == 0;
    if (__builtin_mul_overflow(volume, std::max<std::int64_t>(size, 1),
                               &volume)) {
      return -1;
    }
  }
  if (empty) return 0;
  return volume % 8 == 0 ? volume / 8 : -1;
}

std::string quote(const std::string& text) {
  std::string result = "'";
  for (const char c : text) {
    if (result.size() > kMaxQuotedChars) return result + "...'";
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", byte);
      result += escape;
    }
  }
  return result + "'";
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string result = "[";
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (dim > 0) result += ", ";
    if (dim == kMaxShownDims) {
      result += "...";
      break;
    }
    result += std::to_string(shape[dim]);
  }
  return result + "]";
}

}  // namespace shardbook::internal
