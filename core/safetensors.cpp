#include "core/safetensors.h"

#include <bit>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/internal/mapped_file.h"
#include "core/internal/safetensors_format.h"

namespace shardbook {

using internal::kSafetensorsMaxHeaderBytes;
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

}  // namespace shardbook
