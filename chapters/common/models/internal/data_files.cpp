#include "chapters/common/models/internal/data_files.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "chapters/common/models/data.h"
#include "core/check.h"

namespace shardbook::data_files {

std::string label_of(const std::string& path) { return "--data " + path; }

std::string ending_of(const std::string& path) {
  std::string ending = std::filesystem::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return ending;
}

std::uint64_t integer_at(std::string_view bytes, std::size_t at, int width,
                         bool is_big_endian) {
  std::uint64_t value = 0;
  for (int i = 0; i < width; ++i) {
    const int place = is_big_endian ? width - 1 - i : i;
    const auto byte =
        static_cast<unsigned char>(bytes[at + static_cast<std::size_t>(place)]);
    value |= std::uint64_t{byte} << (8 * i);
  }
  return value;
}

namespace {

/// What a file is that is not text, and what to give in its place.
struct Container {
  std::string_view magic;
  const char* name;
  const char* advice;
};
constexpr char kUnpack[] = "unpack it first";
constexpr char kSaveIds[] = "save its token ids with numpy.save";

const Container* container_of(std::string_view content) {
  static constexpr Container kContainers[] = {
      {{"PK\3\4", 4},
       "a zip archive, as .npz and .pt are",
       "give the .npy inside, or save its token ids with numpy.save"},
      {{"\x1f\x8b", 2}, "compressed by gzip", kUnpack},
      {{"\x28\xb5\x2f\xfd", 4}, "compressed by zstd", kUnpack},
      {{"\xfd\x37zXZ", 5}, "compressed by xz", kUnpack},
      {{"BZh", 3}, "compressed by bzip2", kUnpack},
      {{"PAR1", 4}, "a Parquet table", kSaveIds},
      {{"ARROW1", 6}, "an Arrow table", kSaveIds},
      {{"\x89HDF", 4}, "an HDF5 file", kSaveIds},
      {{"\x80\2", 2}, "a pickle of Python's", kSaveIds},
      {{"\x80\4", 2}, "a pickle of Python's", kSaveIds},
      {{"\x80\5", 2}, "a pickle of Python's", kSaveIds},
      {{"MMIDIDX", 7}, "an index of Megatron-LM's", "give the .bin beside it"},
      {{"\xff\xfe", 2}, "text in UTF-16", "save it as UTF-8"},
      {{"\xfe\xff", 2}, "text in UTF-16", "save it as UTF-8"}};
  for (const Container& each : kContainers) {
    if (content.substr(0, each.magic.size()) == each.magic) return &each;
  }
  static constexpr Container kSafetensors = {
      {}, "a file of safetensors, as weights are", kSaveIds};
  const bool is_safetensors = content.size() > 9 && content[8] == '{' &&
                              integer_at(content, 0, 8) <= content.size() - 8;
  return is_safetensors ? &kSafetensors : nullptr;
}

}  // namespace

void check_text(const std::string& path, std::string_view content) {
  const std::string label = label_of(path), ending = ending_of(path);
  const std::size_t zero = content.find('\0');
  const bool has_zero = zero != std::string_view::npos;
  const Container* container = container_of(content);
  // Files with these names are no plain bytes
  const bool is_named = ending == ".txt" || ending == ".md" || ending == ".bin";
  if (!has_zero && container == nullptr && !is_named) return;
  const std::string problem = has_zero ? "" : utf8_problem(content);
  if (!has_zero && problem.empty()) return;
  SB_CHECK(container == nullptr, label, ": it is ", container->name, "; ",
           container->advice);
  SB_CHECK(!has_zero, label, ": byte ", zero,
           " is 0, so this is no text; give --data-format u16 or u32 for token "
           "ids without a header (u16 for nanoGPT's), bytes for anything else");
  SB_FAIL(label, ": ", problem, "; text files are UTF-8; give --data-format ",
          ending == ".bin" ? "u16 or u32 for token ids, bytes for anything else"
                           : "bytes for anything else");
}

}  // namespace shardbook::data_files
