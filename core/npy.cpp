#include "core/npy.h"

#include <charconv>
#include <regex>

#include "core/check.h"

namespace shardbook {
namespace {

// 64 dims need fewer bytes
constexpr std::size_t kMaxHeader = 4000;
constexpr char kNotNumPys[] = "it is not a .npy file of NumPy's";

/// -1 where 63 bits are too few.
std::int64_t number_in(const std::string& digits) {
  std::int64_t value = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

/// The text of the header: a dict, as Python writes it.
std::string_view header_text(std::string_view start) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(start[i]));
  };
  SB_CHECK(start.size() > 10 && start.substr(0, 6) == "\x93NUMPY" &&
               start[7] == '\0',
           kNotNumPys);
  SB_CHECK(byte(6) >= 1 && byte(6) <= 3, "its format version is ", byte(6),
           ".0; NumPy's are 1.0, 2.0 and 3.0");
  // Version 1 has 16 bits for the length, the others 32
  const bool is_first = byte(6) == 1;
  const std::size_t begin = is_first ? 10 : 12;
  SB_CHECK(start.size() >= begin, kNotNumPys);
  std::size_t length = byte(8) + 256 * byte(9);
  if (!is_first) length += (byte(10) + 256 * byte(11)) << 16;
  SB_CHECK(length <= kMaxHeader && length <= start.size() - begin, kNotNumPys);
  return start.substr(begin, length);
}

}  // namespace

NpyHeader read_npy_header(std::string_view start, std::uint64_t file_bytes) {
  const std::string_view text = header_text(start);
  static const std::regex kText(
      R"(\{'descr': (?:'([ -&(-~]*)'|(\[[ -~]*\])), )"
      R"('fortran_order': (True|False), )"
      R"('shape': \(((?:\d+, )*(?:\d+,?)?)\),? ?\} *\n?)");
  std::match_results<std::string_view::const_iterator> found;
  SB_CHECK(std::regex_match(text.begin(), text.end(), found, kText),
           kNotNumPys);
  SB_CHECK(!found[2].matched, "it has records, whose type is ",
           std::string(found[2]).substr(0, 60));
  NpyHeader header;
  header.offset = static_cast<std::size_t>(text.end() - start.begin());
  header.type = found[1];
  header.is_fortran = found[3] == "True";

  static const std::regex kType(R"([<>|=][biuf](\d+))");
  std::smatch parts;
  SB_CHECK(std::regex_match(header.type, parts, kType), "its type is ",
           header.type.substr(0, 60), "; give an array of numbers");
  const std::int64_t width = number_in(parts[1].str());

  // The values fill the rest of the file: no product overflows
  const auto most = static_cast<std::int64_t>(file_bytes);
  bool fits = width >= 1 && width <= 16;
  static const std::regex kSize(R"(\d+)");
  const std::string sizes = found[4];
  for (std::sregex_iterator size(sizes.begin(), sizes.end(), kSize), end;
       fits && size != end; ++size) {
    header.shape.push_back(number_in(size->str()));
    const std::int64_t rows = header.shape.back();
    fits = rows >= 0 && (rows == 0 || header.num_values <= most / rows);
    if (fits) header.num_values *= rows;
  }
  const auto there = most - static_cast<std::int64_t>(header.offset);
  SB_CHECK(fits && header.num_values * width <= there,
           "its values end early: the shape is (", sizes.substr(0, 60),
           "), and ", there, " bytes follow the header");
  SB_CHECK(header.num_values * width == there, "the shape is (",
           sizes.substr(0, 60), "), which takes ", header.num_values * width,
           " bytes, but ", there, " follow the header");
  return header;
}

}  // namespace shardbook
