// Types, sizes and texts of the format; the parsers of the header and of
// untrusted JSON.

#include "core/internal/safetensors_format.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

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

// --- Parsing -----------------------------------------------------------------

namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int64_t>::max();

std::vector<std::int64_t> read_integers(const Json& value,
                                        const std::string& label) {
  SB_CHECK(value.is_array(), label, " is ", json_kind(value),
           "; it must be an array of integers");
  std::vector<std::int64_t> integers;
  for (const Json& each : value) {
    SB_CHECK(each.is_number_unsigned() && each.get<std::uint64_t>() <= kMaxInt,
             label, " holds ", json_kind(each),
             "; allowed are integers from 0 to ", kMaxInt);
    integers.push_back(each.get<std::int64_t>());
  }
  return integers;
}

/// Reads a tensor, and checks it as far as that is possible without the others.
SafetensorsEntry read_entry(const std::string& name, const Json& value,
                            const std::string& label) {
  SB_CHECK(value.is_object(), label, ": tensor ", quote(name), " is ",
           json_kind(value),
           "; it must be an object with dtype, shape and data_offsets");
  const std::string tensor = label + ": tensor " + quote(name) + ": ";
  for (const auto& [key, ignored] : value.items()) {
    SB_CHECK(key == "dtype" || key == "shape" || key == "data_offsets", tensor,
             "key ", quote(key),
             " is unknown; allowed are dtype, shape and data_offsets");
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    SB_CHECK(value.contains(key), tensor, key, " is missing");
  }
  const Json& dtype = value["dtype"];
  SB_CHECK(dtype.is_string(), tensor, "dtype is ", json_kind(dtype),
           "; it must be a string");
  SafetensorsEntry entry;
  entry.name = name;
  entry.type_name = dtype;
  SB_CHECK(!entry.type_name.empty(), tensor, "dtype is an empty string");
  entry.shape = read_integers(value["shape"], tensor + "shape");
  SB_CHECK(entry.shape.size() <= kSafetensorsMaxDims, tensor,
           "shape has more than ", kSafetensorsMaxDims, " dimensions");
  const auto offsets =
      read_integers(value["data_offsets"], tensor + "data_offsets");
  SB_CHECK(offsets.size() == 2, tensor, "data_offsets has ", offsets.size(),
           " numbers; it must be [begin, end]");
  entry.begin = offsets[0];
  entry.end = offsets[1];
  SB_CHECK(entry.begin <= entry.end, tensor, "data_offsets [", entry.begin,
           ", ", entry.end, "] run backwards");
  const int bits = resolve_safetensors_type(&entry);
  if (bits == 0) return entry;  // a type of unknown size
  const std::int64_t bytes = safetensors_bytes(entry.shape, bits);
  SB_CHECK(bytes >= 0, tensor, "shape ", shape_text(entry.shape), " of ",
           entry.type_name, " is not a whole number of bytes up to ",
           kMaxInt / 8);
  SB_CHECK(entry.end - entry.begin == bytes, tensor, "data_offsets [",
           entry.begin, ", ", entry.end, "] are ", entry.end - entry.begin,
           " bytes, shape ", shape_text(entry.shape), " of ", entry.type_name,
           " needs ", bytes);
  return entry;
}

SafetensorsMetadata read_metadata(const Json& value, const std::string& label) {
  SB_CHECK(value.is_object(), label, ": __metadata__ is ", json_kind(value),
           "; it must be an object of strings");
  SafetensorsMetadata metadata;
  for (const auto& [key, text] : value.items()) {
    SB_CHECK(text.is_string(), label, ": metadata ", quote(key), " is ",
             json_kind(text), "; it must be a string");
    metadata[key] = text;
  }
  return metadata;
}

/// The ranges, laid end to end, are the data section: no hole, no overlap.
void check_coverage(const std::vector<SafetensorsEntry>& entries,
                    std::int64_t data_bytes, const std::string& label) {
  std::int64_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    SB_CHECK(entry.end <= data_bytes, label, ": tensor ", quote(entry.name),
             ": data_offsets [", entry.begin, ", ", entry.end,
             "] reach past the end of the data (", data_bytes,
             " bytes); the file is cut short or its header is wrong");
    SB_CHECK(entry.begin >= covered, label, ": tensor ", quote(entry.name),
             ": data_offsets [", entry.begin, ", ", entry.end,
             "] overlap the tensor before, which ends at ", covered);
    SB_CHECK(entry.begin == covered, label, ": bytes ", covered, " to ",
             entry.begin, " of the data, before tensor ", quote(entry.name),
             ", belong to no tensor; the format allows no holes");
    covered = entry.end;
  }
  SB_CHECK(covered == data_bytes, label, ": ", data_bytes - covered,
           " bytes follow the last tensor, which ends at ", covered,
           "; the format allows no trailing bytes");
}

}  // namespace

std::string json_kind(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_boolean()) return "a boolean";
  if (value.is_string()) return "the string " + quote(value);
  if (value.is_number()) return "the number " + value.dump();
  return value.is_array() ? "an array" : "an object";
}

Json parse_json(const char* text, std::size_t size, const std::string& label) {
  // The parser would take a zero byte for the end
  const void* zero = size == 0 ? nullptr : std::memchr(text, 0, size);
  SB_CHECK(zero == nullptr, label, " is not valid JSON: byte ",
           static_cast<const char*>(zero) - text, " is zero");
  // The keys of each open object: a document would merge duplicates silently
  std::vector<std::unordered_set<std::string>> keys(kMaxJsonDepth + 1);
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start ||
        event == Json::parse_event_t::array_start) {
      SB_CHECK(depth < kMaxJsonDepth, label, " nests deeper than ",
               kMaxJsonDepth);
      keys[static_cast<std::size_t>(depth) + 1].clear();
    } else if (event == Json::parse_event_t::key) {
      const bool is_new =
          keys[static_cast<std::size_t>(depth)].insert(value).second;
      SB_CHECK(is_new, label, ": ", quote(value), " appears twice");
    }
    return true;
  };
  try {
    Json document = Json::parse(text, text + size, check);
    SB_CHECK(document.is_object(), label, " is ", json_kind(document),
             "; it must be an object");
    return document;
  } catch (const Json::exception& error) {
    // Leave out "[json.exception.parse_error.101] "
    const std::string what = error.what();
    SB_FAIL(label, " is not valid JSON in UTF-8: ",
            quote(what.substr(std::min(what.size(), what.find("] ") + 2))));
  }
}

SafetensorsHeader parse_safetensors_header(const char* text, std::size_t size,
                                           std::int64_t data_bytes,
                                           const std::string& label) {
  // JSON may begin with a space or a byte order mark; the header may not
  SB_CHECK(size > 0 && text[0] == '{', label,
           ": the header does not start with '{'; it must be a JSON object");
  const Json document = parse_json(text, size, label + ": the header");
  SafetensorsHeader header;
  for (const auto& [name, value] : document.items()) {
    if (name == kSafetensorsMetadataKey) {
      header.metadata = read_metadata(value, label);
    } else {
      header.entries.push_back(read_entry(name, value, label));
    }
  }
  // An empty tensor comes before the one that starts at the same byte.
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return a.begin != b.begin ? a.begin < b.begin
                                               : a.end < b.end;
                   });
  check_coverage(header.entries, data_bytes, label);
  return header;
}

}  // namespace shardbook::internal
