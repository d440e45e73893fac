#include "chapters/common/models/token_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "chapters/common/models/internal/data_files.h"
#include "core/check.h"
#include "core/npy.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;
using namespace data_files;

// --- Formats with a header ---------------------------------------------------

TokenLayout npy_layout(const TokenFile& file) {
  const std::string label = label_of(file.path);
  NpyHeader header;
  try {
    header = read_npy_header(file.start, file.bytes);
  } catch (const Error& error) {
    SB_FAIL(label, ": ", error.what());
  }
  const char kind = header.type[1];
  SB_CHECK(kind == 'i' || kind == 'u', label, ": its type is ", header.type,
           kind == 'b' ? " (bool)" : "",
           "; token ids are integers, such as <u2 or <i4");
  TokenLayout layout;
  layout.width = std::stoi(header.type.substr(2));
  SB_CHECK(layout.width <= 8, label, ": its type is ", header.type,
           "; give integers of at most 64 bits");
  layout.is_signed = kind == 'i';
  layout.is_big_endian = header.type[0] == '>';
  layout.count = header.num_values;
  layout.offset = header.offset;
  layout.origin = "NumPy";
  if (header.shape.size() > 1) {
    layout.origin +=
        fmt::format(", rows of [{}] joined", fmt::join(header.shape, ", "));
    if (header.is_fortran) layout.fortran_shape = header.shape;
  }
  return layout;
}

constexpr std::uint64_t kLlmcGpt2 = 20240520, kLlmcLlama3 = 20240801,
                        kLlmcQuestions = 20240522;

/// The first of the 256 integers, or 0.
std::uint64_t llmc_magic(std::string_view start) {
  const std::uint64_t magic = start.size() >= 4 ? integer_at(start, 0, 4) : 0;
  return magic == kLlmcGpt2 || magic == kLlmcLlama3 || magic == kLlmcQuestions
             ? magic
             : 0;
}

TokenLayout llmc_layout(const TokenFile& file) {
  constexpr std::size_t kHeader = 1024;
  const std::string label = label_of(file.path);
  const std::uint64_t magic = llmc_magic(file.start);
  SB_CHECK(magic != kLlmcQuestions, label,
           ": holds questions with answers, of llm.c's evaluations; give a "
           "file of tokens");
  SB_CHECK(file.bytes >= kHeader && file.start.size() >= kHeader, label,
           ": ends in llm.c's header, which has ", kHeader, " bytes; it has ",
           file.bytes);
  const bool is_gpt2 = magic == kLlmcGpt2;
  const std::uint64_t version = integer_at(file.start, 4, 4);
  SB_CHECK(version == (is_gpt2 ? 1 : 7), label, ": llm.c's header has version ",
           version, "; give version ", is_gpt2 ? 1 : 7);
  TokenLayout layout;
  layout.width = is_gpt2 ? 2 : 4;
  layout.offset = kHeader;
  const std::uint64_t count = integer_at(file.start, 8, 4);
  const std::uint64_t there = file.bytes - kHeader;
  SB_CHECK(count * static_cast<std::uint64_t>(layout.width) == there, label,
           ": llm.c's header has ", count, " ids of ", 8 * layout.width,
           " bits, but ", there, " bytes follow it");
  layout.count = static_cast<std::int64_t>(count);
  layout.origin = "llm.c";
  return layout;
}

constexpr std::string_view kMegatronMagic("MMIDIDX\0\0", 9);

bool is_megatrons(const TokenFile& file) {
  return file.index && file.index->compare(0, 9, kMegatronMagic) == 0;
}

/// Bytes and sign of the types of an index, by code.
void set_type(std::uint64_t code, const std::string& label,
              TokenLayout& layout) {
  constexpr struct {
    int width;
    bool is_signed;
  } kTypes[] = {{0, false}, {1, false}, {1, true},  {2, true},
                {4, true},  {8, true},  {0, false}, {0, false},
                {2, false}, {4, false}, {8, false}};
  SB_CHECK(code < std::size(kTypes) && kTypes[code].width > 0, label,
           ": its type has code ", code,
           "; token ids are integers, such as 8 (16 bits) or 4 (32 bits)");
  layout.width = kTypes[code].width;
  layout.is_signed = kTypes[code].is_signed;
}

TokenLayout megatron_layout(const TokenFile& file) {
  const std::string& index = *file.index;
  const std::string label =
      label_of(fs::path(file.path).replace_extension(".idx").string());
  constexpr std::size_t kHeader = 34;
  SB_CHECK(index.size() >= kHeader, label, ": ends in its header, of ", kHeader,
           " bytes");
  SB_CHECK(integer_at(index, 9, 8) == 1, label, ": has version ",
           integer_at(index, 9, 8), "; Megatron-LM's is 1");
  TokenLayout layout;
  set_type(integer_at(index, 17, 1), label, layout);
  const std::uint64_t sequences = integer_at(index, 18, 8),
                      documents = integer_at(index, 26, 8);
  // A length and a place of each sequence, and where documents begin and end
  const std::uint64_t rest = index.size() - kHeader;
  SB_CHECK(sequences <= rest / 12 && documents >= 1 &&
               documents == (rest - 12 * sequences) / 8 &&
               (rest - 12 * sequences) % 8 == 0,
           label, ": its header has ", sequences, " sequences and ", documents,
           " ends of documents, but ", rest, " bytes follow it");
  std::uint64_t bytes = 0;
  for (std::uint64_t i = 0; i < sequences; ++i) {
    const auto length =
        static_cast<std::int32_t>(integer_at(index, kHeader + 4 * i, 4));
    const std::uint64_t place =
        integer_at(index, kHeader + 4 * sequences + 8 * i, 8);
    SB_CHECK(length >= 0 && place == bytes, label, ": sequence ", i, " has ",
             length, " ids from byte ", place,
             ", but the one before it ends at byte ", bytes,
             "; give a file whose sequences follow each other");
    bytes += static_cast<std::uint64_t>(length) *
             static_cast<std::uint64_t>(layout.width);
  }
  SB_CHECK(bytes == file.bytes, label, ": its ", sequences, " sequences take ",
           bytes, " bytes, but ", file.path, " has ", file.bytes);
  layout.count = static_cast<std::int64_t>(bytes) / layout.width;
  layout.origin = fmt::format("Megatron-LM, {} document{} joined",
                              documents - 1, documents == 2 ? "" : "s");
  return layout;
}

// --- Ids without a header, and text ------------------------------------------

TokenLayout plain_layout(const TokenFile& file, int width) {
  TokenLayout layout;
  layout.width = width;
  layout.is_text = width == 1;
  layout.count = static_cast<std::int64_t>(file.bytes) / width;
  SB_CHECK(file.bytes % static_cast<std::uint64_t>(width) == 0,
           label_of(file.path), ": ", file.bytes,
           " bytes are not a whole number of ", 8 * width, "-bit token ids");
  return layout;
}

// --- Files -------------------------------------------------------------------

std::ifstream open_file(const std::string& path) {
  const std::string label = label_of(path);
  SB_CHECK(!fs::is_directory(path), label, ": cannot be read: it is a folder");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  const int cause = errno != 0 ? errno : EIO;
  SB_CHECK(file, label, ": cannot be read: ", std::strerror(cause),
           fs::exists(path + ".bin") ? "; give " + path + ".bin" : "");
  return file;
}

std::string read_file(const std::string& path) {
  std::ifstream file = open_file(path);
  std::string bytes((std::istreambuf_iterator<char>(file)),
                    std::istreambuf_iterator<char>());
  SB_CHECK(!file.bad(), label_of(path), ": cannot be read to its end");
  return bytes;
}

TokenFile token_file(const std::string& path, std::string_view start,
                     std::uint64_t bytes) {
  TokenFile file{path, start, bytes, std::nullopt};
  const std::string index = fs::path(path).replace_extension(".idx").string();
  std::error_code ignored;
  if (ending_of(path) == ".bin" && fs::is_regular_file(index, ignored)) {
    file.index = read_file(index);
  }
  return file;
}

}  // namespace

TokenLayout token_layout(const TokenFile& file, const std::string& format) {
  const std::string ending = ending_of(file.path);
  if (format == "bytes") return plain_layout(file, 1);
  const bool is_npy =
      ending == ".npy" || file.start.substr(0, 6) == "\x93NUMPY";
  const bool has_header =
      is_npy || llmc_magic(file.start) != 0 || is_megatrons(file);
  SB_CHECK(!has_header || format == "auto", label_of(file.path),
           ": has a header with its format; leave out --data-format ", format);
  if (is_npy) return npy_layout(file);
  if (is_megatrons(file)) return megatron_layout(file);
  if (has_header) return llmc_layout(file);
  if (format != "auto") return plain_layout(file, format == "u16" ? 2 : 4);
  return plain_layout(file, ending == ".u16" ? 2 : ending == ".u32" ? 4 : 1);
}

std::vector<std::int32_t> token_ids(const std::string& path,
                                    std::string_view content,
                                    const TokenLayout& layout,
                                    const std::string& format) {
  if (layout.is_text && format != "bytes") check_text(path, content);
  const int width = layout.width;
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(layout.count));
  for (std::int64_t i = 0; i < layout.count; ++i) {
    // Row-major positions, of which the last index runs fastest
    std::int64_t place = i;
    if (!layout.fortran_shape.empty()) {
      place = 0;
      std::int64_t rest = i, stride = layout.count;
      for (std::size_t dim = layout.fortran_shape.size(); dim-- > 0;) {
        stride /= layout.fortran_shape[dim];
        place += rest % layout.fortran_shape[dim] * stride;
        rest /= layout.fortran_shape[dim];
      }
    }
    const std::size_t at =
        layout.offset + static_cast<std::size_t>(place * width);
    const std::uint64_t bits =
        integer_at(content, at, width, layout.is_big_endian);
    const int unused = 64 - 8 * width;
    const bool is_negative =
        layout.is_signed && (bits << unused >> 63 & 1) != 0;
    constexpr std::uint64_t kMost = std::numeric_limits<std::int32_t>::max();
    SB_CHECK(!is_negative && bits <= kMost, label_of(path), ": ",
             is_negative
                 ? std::to_string(static_cast<std::int64_t>(bits << unused) >>
                                  unused)
                 : std::to_string(bits),
             " at position ", i, " is not a token id; give 0 to ", kMost);
    ids.push_back(static_cast<std::int32_t>(bits));
  }
  return ids;
}

std::vector<std::int32_t> read_tokens(const std::string& path,
                                      const std::string& format) {
  const std::string content = read_file(path);
  SB_CHECK(!content.empty(), label_of(path), ": the file is empty");
  const TokenFile file = token_file(path, content, content.size());
  return token_ids(path, content, token_layout(file, format), format);
}

std::string describe_tokens(const std::string& path,
                            const std::string& format) {
  // A stream can be read only once
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return "";
  std::string start(kTokenFileStart, '\0');
  std::ifstream file = open_file(path);
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  start.resize(static_cast<std::size_t>(file.gcount()));
  const TokenLayout layout =
      token_layout(token_file(path, start, fs::file_size(path)), format);
  if (layout.is_text) return "";
  return fmt::format("{} token ids ({}{}{}{})", layout.count,
                     layout.is_signed ? "i" : "u", 8 * layout.width,
                     layout.origin.empty() ? "" : ", ", layout.origin);
}

}  // namespace shardbook
