// Whatever bytes a file consists of, reading it ends in a validated file or in
// an Error that says which file is at fault.

#include <algorithm>
#include <cstring>

#include "core/safetensors.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/little_endian.h"

namespace {

using shardbook::kFuzzedInput;
using shardbook::promise;
using shardbook::read_or_refuse;
using shardbook::SafetensorsEntry;
using shardbook::SafetensorsFile;
using shardbook::SafetensorsIndex;

void read_file(const std::string& bytes) {
  // A copy of exact size lets the address sanitizer see the first byte beyond.
  std::vector<char> copy(bytes.begin(), bytes.end());
  read_or_refuse([&] {
    const SafetensorsFile file =
        SafetensorsFile::view(copy.data(), copy.size(), kFuzzedInput);
    std::int64_t covered = 0;
    unsigned sum = 0;
    for (const SafetensorsEntry& entry : file.entries()) {
      promise(file.contains(entry.name) && entry.begin == covered);
      covered = entry.end;
      if (!entry.supported) continue;
      promise(&file.find(entry.name) == &entry);
      std::int64_t volume = 1;
      for (const std::int64_t size : entry.shape) volume *= size;
      promise(volume * static_cast<std::int64_t>(dtype_bytes(entry.dtype)) ==
              entry.end - entry.begin);
      const auto* data = static_cast<const unsigned char*>(file.data(entry));
      for (std::int64_t i = 0; i < entry.end - entry.begin; ++i) {
        sum += data[i];
      }
    }
    // Keeps the compiler from dropping the loop above.
    static volatile unsigned sink;
    sink = sum;
    (void)sink;
  });
}

void read_index(const std::string& text) {
  read_or_refuse([&] {
    const SafetensorsIndex index = shardbook::parse_safetensors_index(
        text.data(), text.size(), kFuzzedInput);
    for (const auto& [name, file] : index) {
      promise(file.find('/') == std::string::npos && !file.empty());
    }
  });
}

std::string with_length(std::size_t length, const std::string& rest) {
  return shardbook::little_endian(length, 8) + rest;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string bytes = shardbook::text_of(data, size);
  read_file(bytes);
  read_index(bytes);
  // Mutations rarely get the length right. Here it reaches to the last brace,
  // so that changes behind the parser of the length are seen too.
  if (size > 8) {
    const std::string rest = bytes.substr(8);
    const std::size_t brace = rest.rfind('}');
    if (brace != std::string::npos) read_file(with_length(brace + 1, rest));
    read_index(rest);
  }
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  const std::vector<std::string> headers = {
      R"({})",
      R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})",
      R"({"__metadata__":{"format":"pt","config":"{\"n\":1}"},)"
      R"("b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})",
      R"({"x":{"dtype":"BF16","shape":[],"data_offsets":[14,16]},)"
      R"("y":{"dtype":"U8","shape":[14],"data_offsets":[0,14]},)"
      R"("z":{"dtype":"F64","shape":[3,0],"data_offsets":[14,14]}}  )",
      R"({"q":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}})",
      R"({"q":{"dtype":"XYZ","shape":[1],"data_offsets":[0,16]}})"};
  std::vector<std::string> seeds = {""};
  for (const std::string& header : headers) {
    const std::size_t data = header == "{}" ? 0 : 16;
    seeds.push_back(
        with_length(header.size(), header + std::string(data, 'd')));
  }
  seeds.push_back(R"({"metadata":{"total_size":16,"more":[1,{"x":null}]},)"
                  R"("weight_map":{"a":"model-00001-of-00002.safetensors",)"
                  R"("b":"model-00002-of-00002.safetensors"}})");
  return seeds;
}
