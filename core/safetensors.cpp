#include "core/safetensors.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/internal/files.h"
#include "core/internal/safetensors_format.h"

namespace shardbook {

using internal::kSafetensorsMaxDims;
using internal::kSafetensorsMaxHeaderBytes;
using internal::kSafetensorsMetadataKey;
using internal::kSafetensorsPrefixBytes;
using internal::quote;

static_assert(std::endian::native == std::endian::little,
              "safetensors holds little-endian numbers, used here as they are");

namespace {

std::uint64_t read_u64(const unsigned char* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | bytes[i];
  return value;
}

}  // namespace

struct SafetensorsFile::Impl {
  std::string path;
  std::unique_ptr<internal::MappedFile> mapping;  // null for a view
  internal::SafetensorsHeader header;
  std::unordered_map<std::string, std::size_t> index_of;
  const char* data = nullptr;
  std::int64_t data_bytes = 0;

  void parse(const void* bytes, std::size_t size);
  void check_supported(const SafetensorsEntry& entry) const;
};

void SafetensorsFile::Impl::parse(const void* bytes, std::size_t size) {
  SB_CHECK(size >= kSafetensorsPrefixBytes, path, ": the file has ", size,
           " bytes; a safetensors file starts with an 8-byte header length");
  const char* text = static_cast<const char*>(bytes) + kSafetensorsPrefixBytes;
  const std::size_t rest = size - kSafetensorsPrefixBytes;
  const std::uint64_t header_bytes =
      read_u64(static_cast<const unsigned char*>(bytes));
  SB_CHECK(header_bytes >= 1 && header_bytes <= kSafetensorsMaxHeaderBytes,
           path, ": the header length is ", header_bytes, "; allowed are 1 to ",
           kSafetensorsMaxHeaderBytes, " (is this a safetensors file?)");
  SB_CHECK(header_bytes <= rest, path, ": the header length is ", header_bytes,
           ", but only ", rest, " bytes follow; the file is cut short");

  data = text + header_bytes;
  data_bytes = static_cast<std::int64_t>(rest - header_bytes);
  header =
      internal::parse_safetensors_header(text, header_bytes, data_bytes, path);
  index_of.reserve(header.entries.size());
  for (std::size_t i = 0; i < header.entries.size(); ++i) {
    index_of.emplace(header.entries[i].name, i);
  }
}

void SafetensorsFile::Impl::check_supported(
    const SafetensorsEntry& entry) const {
  SB_CHECK(entry.supported, path, ": tensor ", quote(entry.name), " has dtype ",
           quote(entry.type_name),
           "; supported are F64, F32, BF16, F16, I64 and I32");
}

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Impl> impl)
    : impl_(std::move(impl)) {}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  impl->mapping = std::make_unique<internal::MappedFile>(path);
  impl->parse(impl->mapping->bytes(), impl->mapping->size());
  return SafetensorsFile(std::move(impl));
}

SafetensorsFile SafetensorsFile::view(const void* bytes, std::size_t size,
                                      const std::string& label) {
  auto impl = std::make_shared<Impl>();
  impl->path = label;
  impl->parse(bytes, size);
  return SafetensorsFile(std::move(impl));
}

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const {
  return impl_->header.entries;
}

bool SafetensorsFile::contains(const std::string& name) const {
  return impl_->index_of.count(name) > 0;
}

const SafetensorsEntry& SafetensorsFile::find(const std::string& name) const {
  const auto found = impl_->index_of.find(name);
  if (found == impl_->index_of.end()) {
    const std::size_t count = entries().size();
    SB_FAIL(
        impl_->path, ": there is no tensor ", quote(name), " among its ", count,
        " tensors",
        count > 0 ? ", the first of which is " + quote(entries()[0].name) : "");
  }
  const SafetensorsEntry& entry = entries()[found->second];
  impl_->check_supported(entry);
  return entry;
}

const SafetensorsMetadata& SafetensorsFile::metadata() const {
  return impl_->header.metadata;
}

const std::string& SafetensorsFile::path() const { return impl_->path; }

const void* SafetensorsFile::data(const SafetensorsEntry& entry) const {
  impl_->check_supported(entry);
  SB_CHECK(entry.begin >= 0 && entry.begin <= entry.end &&
               entry.end <= impl_->data_bytes,
           impl_->path, ": tensor ", quote(entry.name), " with bytes ",
           entry.begin, " to ", entry.end, " is not from this file, which has ",
           impl_->data_bytes, " bytes of data");
  return impl_->data + entry.begin;
}

// --- Writing -----------------------------------------------------------------

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
