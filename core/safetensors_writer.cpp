#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/internal/atomic_file.h"
#include "core/internal/safetensors_format.h"
#include "core/safetensors.h"

namespace shardbook {

using internal::kSafetensorsMaxDims;
using internal::kSafetensorsMaxHeaderBytes;
using internal::kSafetensorsMetadataKey;
using internal::kSafetensorsPrefixBytes;
using internal::quote;

namespace {

/// Checks the items and gives each its place in the data section.
std::vector<SafetensorsEntry> lay_out(
    const std::string& path, const std::vector<SafetensorsItem>& items) {
  std::vector<SafetensorsEntry> entries;
  std::unordered_set<std::string> names;
  for (const SafetensorsItem& item : items) {
    const std::string tensor = path + ": tensor " + quote(item.name);
    SB_CHECK(!item.name.empty(), path, ": a tensor has an empty name");
    SB_CHECK(item.name != kSafetensorsMetadataKey, tensor,
             ": this name is reserved by the format");
    SB_CHECK(names.insert(item.name).second, tensor, " is given twice");
    SB_CHECK(item.shape.size() <= kSafetensorsMaxDims, tensor, " has ",
             item.shape.size(), " dimensions; allowed are up to ",
             kSafetensorsMaxDims);
    SafetensorsEntry entry;
    entry.name = item.name;
    entry.dtype = item.dtype;
    entry.type_name = internal::safetensors_type_name(item.dtype);
    entry.shape = item.shape;
    const int bits = static_cast<int>(dtype_bytes(item.dtype)) * 8;
    entry.end = internal::safetensors_bytes(item.shape, bits);
    SB_CHECK(entry.end >= 0, tensor, ": shape ",
             internal::shape_text(item.shape), " of ", entry.type_name,
             " has a negative or too large size");
    entries.push_back(std::move(entry));
  }
  // Larger elements first: then every tensor is aligned to its element.
  std::stable_sort(entries.begin(), entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
                   });
  std::int64_t offset = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.begin = offset;
    SB_CHECK(!__builtin_add_overflow(offset, entry.end, &offset), path,
             ": the tensors together exceed ",
             std::numeric_limits<std::int64_t>::max(), " bytes");
    entry.end = offset;
  }
  return entries;
}

std::string json_string(const std::string& path, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    SB_FAIL(path, ": ", quote(text), " is not valid UTF-8");
  }
}

/// The length and the header, padded so that the data starts at a multiple of
/// eight. Keys are in the order of the data.
std::string header_bytes(const std::string& path,
                         const std::vector<SafetensorsEntry>& entries,
                         const SafetensorsMetadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (text.back() != '{') text += ',';
      text += json_string(path, key) + ':' + json_string(path, value);
    }
    text += '}';
  }
  for (const SafetensorsEntry& entry : entries) {
    if (text.back() != '{') text += ',';
    text += json_string(path, entry.name) + ":{\"dtype\":\"" + entry.type_name +
            "\",\"shape\":[";
    for (std::size_t dim = 0; dim < entry.shape.size(); ++dim) {
      if (dim > 0) text += ',';
      text += std::to_string(entry.shape[dim]);
    }
    text += "],\"data_offsets\":[" + std::to_string(entry.begin) + ',' +
            std::to_string(entry.end) + "]}";
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  SB_CHECK(text.size() <= kSafetensorsMaxHeaderBytes, path, ": the header has ",
           text.size(), " bytes; allowed are up to ",
           kSafetensorsMaxHeaderBytes);

  std::string result(kSafetensorsPrefixBytes, '\0');
  for (std::size_t i = 0; i < kSafetensorsPrefixBytes; ++i) {
    result[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return result + text;
}

}  // namespace

void write_safetensors(const std::string& path,
                       const std::vector<SafetensorsItem>& items,
                       const SafetensorsMetadata& metadata) {
  const std::vector<SafetensorsEntry> entries = lay_out(path, items);
  const std::string header = header_bytes(path, entries, metadata);
  std::map<std::string, const void*> data_of;
  for (const SafetensorsItem& item : items) data_of[item.name] = item.data;
  internal::AtomicFile file(path);
  file.write(header.data(), header.size());
  for (const SafetensorsEntry& entry : entries) {
    const auto bytes = static_cast<std::size_t>(entry.end - entry.begin);
    const void* data = data_of[entry.name];
    SB_CHECK(data != nullptr || bytes == 0, path, ": tensor ",
             quote(entry.name), " has no data, but needs ", bytes, " bytes");
    file.write(data, bytes);
  }
  file.commit();
}

}  // namespace shardbook
