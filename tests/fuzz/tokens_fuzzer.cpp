// Whatever bytes a file of --data consists of, reading it ends in ids that all
// lie in the file, or in an Error that names the file and can be read.

#include "chapters/common/models/token_files.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/little_endian.h"

namespace {

using namespace shardbook;

constexpr std::size_t kBytesBesideIndex = 12;

void read(const std::string& path, const std::string& bytes,
          const std::optional<std::string>& index) {
  // A copy of exact size lets the address sanitizer see the first byte beyond.
  const std::vector<char> copy(bytes.begin(), bytes.end());
  const std::string_view content(copy.data(), copy.size());
  read_or_refuse(
      [&] {
        const TokenFile file{path, content.substr(0, kTokenFileStart),
                             copy.size(), index};
        const TokenLayout layout = token_layout(file, "auto");
        const auto size = static_cast<std::size_t>(layout.count) *
                          static_cast<std::size_t>(layout.width);
        promise(layout.offset + size == copy.size());
        const auto ids = token_ids(path, content, layout, "auto");
        promise(static_cast<std::int64_t>(ids.size()) == layout.count);
      },
      /*max_size=*/1000, "--data fuzzed");
}

std::string npy(const std::string& header, const std::string& values) {
  return std::string("\x93NUMPY\1\0", 8) + little_endian(header.size(), 2) +
         header + values;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string bytes = text_of(data, size);
  read("fuzzed.bin", bytes, std::nullopt);
  if (bytes.starts_with("MMIDIDX")) {
    read("fuzzed.bin", std::string(kBytesBesideIndex, '\0'), bytes);
  }
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  const std::string llmc = little_endian(20240520, 4) + little_endian(1, 4) +
                           little_endian(3, 4) + std::string(1012, '\0');
  // Two sequences of 2 and 4 ids of 16 bits, one document each
  const std::string index =
      std::string("MMIDIDX\0\0", 9) + little_endian(1, 8) +
      little_endian(8, 1) + little_endian(2, 8) + little_endian(3, 8) +
      little_endian(2, 4) + little_endian(4, 4) + little_endian(0, 8) +
      little_endian(4, 8) + little_endian(0, 8) + little_endian(1, 8) +
      little_endian(2, 8);
  return {"",
          "text",
          llmc + "123456",
          index,
          npy("{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n",
              "123456"),
          npy("{'descr': '>i4', 'fortran_order': True, 'shape': (2, 2), }\n",
              "1234567812345678"),
          npy("{'descr': [('a', '<i4')], 'fortran_order': True, 'shape': (), "
              "}\n",
              "1234")};
}
