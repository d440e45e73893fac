#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/internal/files.h"
#include "core/internal/safetensors_format.h"
#include "core/safetensors.h"

namespace shardbook {

using internal::quote;

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr const char* kFileEnding = ".safetensors";
constexpr const char* kIndexEnding = ".safetensors.index.json";
constexpr std::size_t kMaxIndexBytes = internal::kSafetensorsMaxHeaderBytes;

/// A manifest's files are in its folder: names that lead elsewhere are refused.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

/// The file that `path` stands for; see CheckpointReader::open.
std::string resolve_checkpoint(const std::string& path) {
  std::error_code ignored;
  const auto first_file = [&](const std::string& stem) -> std::string {
    for (const char* ending : {kFileEnding, kIndexEnding}) {
      if (fs::is_regular_file(stem + ending, ignored)) return stem + ending;
    }
    return "";
  };
  if (fs::is_directory(path, ignored)) {
    const std::string file = first_file((fs::path(path) / "model").string());
    SB_CHECK(!file.empty(), path, ": this folder holds neither model",
             kFileEnding, " nor model", kIndexEnding);
    return file;
  }
  if (fs::exists(path, ignored)) return path;
  const std::string file = first_file(path);
  SB_CHECK(!file.empty(), path, ": there is no such checkpoint, nor one named ",
           path, kFileEnding, " or ", path, kIndexEnding);
  return file;
}

}  // namespace

std::string safetensors_shard_name(const std::string& stem, int shard,
                                   int num_shards) {
  SB_CHECK(num_shards >= 1 && num_shards <= 99999 && shard >= 0 &&
               shard < num_shards,
           "shard ", shard, " of ", num_shards,
           ": allowed are shards 0 to n-1 of n, and n from 1 to 99999");
  char numbers[32];
  std::snprintf(numbers, sizeof numbers, "-%05d-of-%05d", shard + 1,
                num_shards);
  return stem + numbers + kFileEnding;
}

SafetensorsIndex parse_safetensors_index(const void* text, std::size_t size,
                                         const std::string& label) {
  SB_CHECK(size <= kMaxIndexBytes, label, ": the manifest has ", size,
           " bytes; allowed are up to ", kMaxIndexBytes);
  const Json manifest = internal::parse_json(static_cast<const char*>(text),
                                             size, label + ": the manifest");
  SB_CHECK(manifest.contains("weight_map"), label, ": weight_map is missing");
  const Json& map = manifest["weight_map"];
  SB_CHECK(map.is_object(), label, ": weight_map is ", internal::json_kind(map),
           "; it must be an object of strings");
  SafetensorsIndex index;
  for (const auto& [name, file] : map.items()) {
    SB_CHECK(file.is_string(), label, ": tensor ", quote(name),
             " in weight_map is ", internal::json_kind(file),
             "; it must be a string");
    SB_CHECK(is_plain_file_name(file), label, ": tensor ", quote(name),
             " is in file ", quote(file),
             "; it must be the name of a file beside the manifest");
    index[name] = file;
  }
  return index;
}

struct CheckpointReader::Impl {
  explicit Impl(const std::string& checkpoint);
  void add_indexed();

  std::string path;
  std::vector<SafetensorsFile> files;
  std::vector<std::string> names;
  std::unordered_map<std::string, std::size_t> file_of;
  SafetensorsMetadata metadata;
};

CheckpointReader::Impl::Impl(const std::string& checkpoint)
    : path(resolve_checkpoint(checkpoint)) {
  if (path.ends_with(".json")) {
    add_indexed();
  } else {
    files.push_back(SafetensorsFile::open(path));
    for (const SafetensorsEntry& entry : files[0].entries()) {
      names.push_back(entry.name);
      file_of.emplace(entry.name, 0);
    }
  }
  for (const SafetensorsFile& file : files) {
    metadata.insert(file.metadata().begin(), file.metadata().end());
  }
}

void CheckpointReader::Impl::add_indexed() {
  const internal::MappedFile text(path);
  const SafetensorsIndex index =
      parse_safetensors_index(text.bytes(), text.size(), path);
  const fs::path folder = fs::path(path).parent_path();
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, file] : index) {
    const auto [place, is_new] = opened.emplace(file, files.size());
    if (is_new) {
      files.push_back(SafetensorsFile::open((folder / file).string()));
    }
    const std::size_t number = place->second;
    SB_CHECK(files[number].contains(name), path,
             ": weight_map promises tensor ", quote(name), " in ", quote(file),
             ", which does not hold it");
    file_of.emplace(name, number);
  }
  // A file may hold more than the manifest names; skip the rest.
  for (const auto& [file, number] : opened) {
    for (const SafetensorsEntry& entry : files[number].entries()) {
      const auto found = file_of.find(entry.name);
      if (found != file_of.end() && found->second == number) {
        names.push_back(entry.name);
      }
    }
  }
}

CheckpointReader::CheckpointReader(std::shared_ptr<const Impl> impl)
    : impl_(std::move(impl)) {}

CheckpointReader CheckpointReader::open(const std::string& path) {
  return CheckpointReader(std::make_shared<const Impl>(path));
}

const std::vector<std::string>& CheckpointReader::names() const {
  return impl_->names;
}

bool CheckpointReader::contains(const std::string& name) const {
  return impl_->file_of.count(name) > 0;
}

const SafetensorsEntry& CheckpointReader::find(const std::string& name) const {
  const auto found = impl_->file_of.find(name);
  SB_CHECK(found != impl_->file_of.end(), impl_->path, ": there is no tensor ",
           quote(name), " among the ", impl_->names.size(),
           " tensors of this checkpoint");
  return impl_->files[found->second].find(name);
}

const void* CheckpointReader::data(const std::string& name) const {
  const SafetensorsEntry& entry = find(name);
  return impl_->files[impl_->file_of.at(name)].data(entry);
}

const SafetensorsMetadata& CheckpointReader::metadata() const {
  return impl_->metadata;
}

}  // namespace shardbook
