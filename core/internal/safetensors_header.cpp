// The parser of the header. It listens to the JSON parser's events instead of
// building a document: a document would merge duplicate keys silently and nest
// as deep as a hostile file likes. Here anything unexpected is an error at
// once, so nothing ever nests deeper than three.

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "core/check.h"
#include "core/internal/safetensors_format.h"

namespace shardbook::internal {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int64_t>::max();

class HeaderReader : public Json::json_sax_t {
 public:
  HeaderReader(const std::string& label, SafetensorsHeader* header)
      : label_(label), header_(header) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool binary(Json::binary_t&) override { unexpected("binary data"); }

  bool number_float(double, const std::string& text) override {
    unexpected("the number " + text.substr(0, 40));
  }
  bool number_integer(std::int64_t value) override {
    unexpected("the number " + std::to_string(value));
  }

  bool number_unsigned(std::uint64_t value) override {
    const bool in_array = place_ == Place::kShape || place_ == Place::kOffsets;
    if (!in_array || value > static_cast<std::uint64_t>(kMaxInt)) {
      unexpected("the number " + std::to_string(value));
    }
    if (place_ == Place::kShape) {
      SB_CHECK(entry_.shape.size() < kSafetensorsMaxDims, tensor(),
               "shape has more than ", kSafetensorsMaxDims, " dimensions");
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      SB_CHECK(num_offsets_ < 2, tensor(),
               "data_offsets has more than two numbers");
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) =
          static_cast<std::int64_t>(value);
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      const bool inserted =
          header_->metadata.emplace(key_, std::move(value)).second;
      SB_CHECK(inserted, label_, ": metadata ", quote(key_), " appears twice");
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      entry_.type_name = std::move(value);
    } else {
      unexpected("the string " + quote(value));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        if (key_ == kSafetensorsMetadataKey) {
          place_ = Place::kMetadata;
        } else {
          place_ = Place::kTensor;
          entry_ = SafetensorsEntry();
          entry_.name = key_;
          num_offsets_ = 0;
          seen_dtype_ = seen_shape_ = seen_offsets_ = false;
        }
        return true;
      default:
        unexpected("an object");
    }
  }

  bool key(std::string& value) override {
    key_ = std::move(value);
    if (place_ == Place::kTop) {
      SB_CHECK(names_.insert(key_).second, label_, ": ", quote(key_),
               " appears twice in the header");
    } else if (place_ == Place::kTensor) {
      bool* seen = key_ == "dtype"          ? &seen_dtype_
                   : key_ == "shape"        ? &seen_shape_
                   : key_ == "data_offsets" ? &seen_offsets_
                                            : nullptr;
      SB_CHECK(seen != nullptr, tensor(), "key ", quote(key_),
               " is unknown; allowed are dtype, shape and data_offsets");
      SB_CHECK(!*seen, tensor(), key_, " appears twice");
      *seen = true;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) finish_entry();
    place_ = place_ == Place::kTop ? Place::kDone : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    SB_CHECK(place_ != Place::kOffsets || num_offsets_ == 2, tensor(),
             "data_offsets has ", num_offsets_,
             " numbers; it must be [begin, end]");
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const Json::exception& error) override {
    SB_FAIL(label_, ": the header is not valid JSON in UTF-8, at byte ",
            position, ": ", json_cause(error.what()));
  }

 private:
  // The parser's position, which decides what is allowed next.
  enum class Place {
    kStart,
    kTop,
    kMetadata,
    kTensor,
    kShape,
    kOffsets,
    kDone
  };

  std::string tensor() const {
    return label_ + ": tensor " + quote(entry_.name) + ": ";
  }

  [[noreturn]] void unexpected(const std::string& what) const {
    switch (place_) {
      case Place::kTop:
        if (key_ == kSafetensorsMetadataKey) {
          SB_FAIL(label_, ": __metadata__ is ", what,
                  "; it must be an object of strings");
        }
        SB_FAIL(label_, ": tensor ", quote(key_), " is ", what,
                "; it must be an object with dtype, shape and data_offsets");
      case Place::kMetadata:
        SB_FAIL(label_, ": metadata ", quote(key_), " is ", what,
                "; it must be a string");
      case Place::kTensor:
        SB_FAIL(tensor(), key_, " is ", what, "; it must be ",
                key_ == "dtype" ? "a string" : "an array of integers");
      case Place::kShape:
      case Place::kOffsets:
        SB_FAIL(tensor(), key_, " holds ", what,
                "; allowed are integers from 0 to ", kMaxInt);
      case Place::kStart:
      case Place::kDone:
        break;
    }
    SB_FAIL(label_, ": the header is ", what, "; it must be an object");
  }

  /// Checks a tensor as far as that is possible without the others.
  void finish_entry() {
    SB_CHECK(seen_dtype_, tensor(), "dtype is missing");
    SB_CHECK(seen_shape_, tensor(), "shape is missing");
    SB_CHECK(seen_offsets_, tensor(), "data_offsets is missing");
    SB_CHECK(!entry_.type_name.empty(), tensor(), "dtype is an empty string");
    SB_CHECK(entry_.begin <= entry_.end, tensor(), "data_offsets [",
             entry_.begin, ", ", entry_.end, "] run backwards");
    const int bits = resolve_safetensors_type(&entry_);
    // The size of an unknown type cannot be checked.
    if (bits > 0) {
      const std::int64_t bytes = safetensors_bytes(entry_.shape, bits);
      SB_CHECK(bytes >= 0, tensor(), "shape ", shape_text(entry_.shape), " of ",
               entry_.type_name, " is not a whole number of bytes up to ",
               kMaxInt / 8);
      SB_CHECK(entry_.end - entry_.begin == bytes, tensor(), "data_offsets [",
               entry_.begin, ", ", entry_.end, "] are ",
               entry_.end - entry_.begin, " bytes, shape ",
               shape_text(entry_.shape), " of ", entry_.type_name, " needs ",
               bytes);
    }
    header_->entries.push_back(std::move(entry_));
  }

  const std::string& label_;
  SafetensorsHeader* header_;
  Place place_ = Place::kStart;
  std::string key_;
  SafetensorsEntry entry_;
  int num_offsets_ = 0;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
  std::unordered_set<std::string> names_;
};

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

SafetensorsHeader parse_safetensors_header(const char* text, std::size_t size,
                                           std::int64_t data_bytes,
                                           const std::string& label) {
  // The JSON parser would skip a byte order mark and stop at a zero byte; the
  // format allows neither.
  SB_CHECK(size > 0 && text[0] == '{', label,
           ": the header does not start with '{'; it must be a JSON object");
  const void* zero = std::memchr(text, 0, size);
  SB_CHECK(zero == nullptr, label, ": the header is not valid JSON: byte ",
           static_cast<const char*>(zero) - text, " is zero");

  SafetensorsHeader header;
  HeaderReader reader(label, &header);
  Json::sax_parse(text, text + size, &reader);

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
