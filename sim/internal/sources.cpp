#include "sim/internal/sources.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/check.h"
#include "sim/internal/presets.h"

namespace shardbook::sim::internal {

namespace {
constexpr std::uintmax_t kMaxFileBytes = 1 << 20;
}  // namespace

bool is_file_name(const std::string& name) {
  constexpr const char* kEnding = ".json";
  return name.size() > 5 && name.compare(name.size() - 5, 5, kEnding) == 0;
}

std::string read_file(const std::string& file) {
  std::error_code error;
  SB_CHECK(std::filesystem::is_regular_file(file, error), file,
           ": is not a file that can be read");
  SB_CHECK(std::filesystem::file_size(file, error) <= kMaxFileBytes, file,
           ": is larger than 1 MiB, which no description of a cluster is");
  std::ifstream stream(file, std::ios::binary);
  SB_CHECK(stream.good(), file, ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
    if (preset.folder == folder) names.push_back(preset.name);
  }
  return names;
}

Source find_source(const std::string& folder, const std::string& name,
                   const std::string& directory, const std::string& where) {
  for (const Preset& preset : presets()) {
    if (preset.folder == folder && preset.name == name) {
      return {preset.text, "preset " + name, ""};
    }
  }
  if (is_file_name(name)) {
    const std::filesystem::path path = std::filesystem::path(directory) / name;
    return {read_file(path.string()), path.string(),
            path.parent_path().string()};
  }
  std::vector<std::string> known = names_in(folder);
  if (folder == "clusters") known.push_back("this-machine");
  const std::string guess = nearest(name, known);
  SB_FAIL(where, "\"", printable(name), "\" is unknown; ",
          guess.empty() ? "give" : "did you mean \"" + guess + "\"? Give",
          " a FILE.json or one of ", fmt::format("{}", fmt::join(known, ", ")));
}

Source Chain::find(const std::string& folder, const std::string& name,
                   const Source& from, const std::string& where) const {
  SB_CHECK(files_allowed_ || !is_file_name(name), where, "\"", printable(name),
           "\" is a file; only presets can be named here");
  const Source source = find_source(folder, name, from.directory, where);
  SB_CHECK(source.label != from.label &&
               std::find(labels_.begin(), labels_.end(), source.label) ==
                   labels_.end(),
           where, "\"", printable(name),
           "\" leads back to a file that extends this one");
  return source;
}

}  // namespace shardbook::sim::internal
