#pragma once

// Shared by the reader and the writers of safetensors: limits, type names,
// checked sizes, and the parser of the header.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/safetensors.h"

namespace shardbook::internal {

/// Bytes of the length in front of the header.
constexpr std::size_t kSafetensorsPrefixBytes = 8;
/// The format's own limit: a false length must not cost memory.
constexpr std::size_t kSafetensorsMaxHeaderBytes = 100'000'000;
/// Our limit: a hostile header must not turn one byte into one dimension.
constexpr std::size_t kSafetensorsMaxDims = 64;
constexpr const char* kSafetensorsMetadataKey = "__metadata__";

/// "F32" and so on, as the format spells the types of this library.
const char* safetensors_type_name(DType dtype);

/// Sets dtype and supported from type_name; returns the bits of an element, or
/// 0 for an unknown type.
int resolve_safetensors_type(SafetensorsEntry* entry);

/// Bytes of a tensor, or -1 when they exceed the largest std::int64_t or are
/// not whole. The other dimensions must fit even if one is 0: strides would
/// overflow.
std::int64_t safetensors_bytes(const std::vector<std::int64_t>& shape,
                               int element_bits);

/// A name from a file, for a message: quoted, control characters and foreign
/// bytes escaped, cut after about 100 characters.
std::string quote(const std::string& text);

/// "[2, 3]", cut after 8 dimensions.
std::string shape_text(const std::vector<std::int64_t>& shape);

constexpr int kMaxJsonDepth = 64;
/// Parses the JSON object of an untrusted file. Throws Error that begins with
/// `label` for anything else, for repeated keys, and for nesting deeper than
/// kMaxJsonDepth.
nlohmann::json parse_json(const char* text, std::size_t size,
                          const std::string& label);
/// "a boolean", "the number 3": a value in a message.
std::string json_kind(const nlohmann::json& value);

struct SafetensorsHeader {
  /// In the order of their bytes.
  std::vector<SafetensorsEntry> entries;
  SafetensorsMetadata metadata;
};

/// Parses the JSON of a header and checks it against the size of the data.
/// Throws shardbook::Error; every message starts with `label`.
SafetensorsHeader parse_safetensors_header(const char* text, std::size_t size,
                                           std::int64_t data_bytes,
                                           const std::string& label);

}  // namespace shardbook::internal
