#include "chapters/03_zero_fsdp/zero/zero_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "chapters/common/models/checkpoint.h"
#include "core/check.h"
#include "core/context.h"
#include "core/safetensors.h"

namespace shardbook::zero {
namespace {

constexpr char kStem[] = "zero";

std::string key_of(const ShardPiece& piece) {
  return piece.field + ":" + piece.name;
}

/// "begin dim dim ..."
std::string place_of(const ShardPiece& piece) {
  std::string text = std::to_string(piece.begin);
  for (const std::int64_t size : piece.shape) {
    text += " " + std::to_string(size);
  }
  return text;
}

const std::string& metadata_of(const SafetensorsFile& file,
                               const std::string& key) {
  const auto found = file.metadata().find(key);
  SB_CHECK(found != file.metadata().end(), file.path(),
           ": the metadata has no \"", key,
           "\"; this is not a file of save_sharded");
  return found->second;
}

std::int64_t count_of(const SafetensorsFile& file, const std::string& key) {
  const std::string& text = metadata_of(file, key);
  std::istringstream in(text);
  std::int64_t value = -1;
  SB_CHECK(in >> value && value >= 0 && in.eof(), file.path(), ": \"", key,
           "\" is \"", text, "\"; a count is expected");
  return value;
}

/// A part's name, place and shape; no values yet.
ShardPiece piece_of(const SafetensorsFile& file,
                    const SafetensorsEntry& entry) {
  const std::size_t colon = entry.name.find(':');
  SB_CHECK(colon != std::string::npos, file.path(), ": tensor '", entry.name,
           "' is not named FIELD:PARAMETER");
  ShardPiece piece;
  piece.field = entry.name.substr(0, colon);
  piece.name = entry.name.substr(colon + 1);
  const std::string& place = metadata_of(file, entry.name);
  std::istringstream in(place);
  bool is_valid = static_cast<bool>(in >> piece.begin) && piece.begin >= 0;
  for (std::int64_t size; in >> size;) {
    is_valid = is_valid && size >= 0;
    piece.shape.push_back(size);
  }
  SB_CHECK(is_valid && in.eof() && entry.supported && entry.shape.size() == 1 &&
               entry.shape[0] <= shape_numel(piece.shape) - piece.begin,
           file.path(), ": '", entry.name, "' of shape ",
           shape_text(entry.shape), " cannot lie at \"", place,
           "\" (first element, then the dims of the whole)");
  return piece;
}

std::vector<SafetensorsFile> open_all(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(std::string(kStem) + "-", 0) == 0 &&
        entry.path().extension() == ".safetensors") {
      paths.push_back(entry.path().string());
    }
  }
  SB_CHECK(!error, folder, ": cannot be read (", error.message(), ")");
  SB_CHECK(!paths.empty(), folder, ": holds no ", kStem,
           "-NNNNN-of-NNNNN.safetensors");
  std::sort(paths.begin(), paths.end());
  std::vector<SafetensorsFile> files;
  for (const std::string& path : paths) {
    files.push_back(SafetensorsFile::open(path));
    const std::int64_t ranks = count_of(files.back(), "ranks");
    SB_CHECK(ranks == static_cast<std::int64_t>(paths.size()), path,
             ": was written by ", ranks, " ranks, ", folder, " holds ",
             paths.size(), " files; give a folder with one whole checkpoint");
    SB_CHECK(count_of(files.back(), "steps") == count_of(files[0], "steps"),
             path, ": was written after another step than ", paths[0]);
  }
  return files;
}

}  // namespace

void save_sharded(ZeroOptimizer& zero, const std::string& folder) {
  const int rank = zero.group().rank(), ranks = zero.group().size();
  std::vector<SafetensorsItem> items;
  SafetensorsMetadata metadata = {{"ranks", std::to_string(ranks)},
                                  {"steps", std::to_string(zero.steps_done())}};
  std::vector<ShardPiece> pieces = zero.shards();
  for (ShardPiece& piece : pieces) {
    if (piece.values.is_meta()) continue;
    piece.values = on_host({{piece.name, piece.values}})[0].tensor;
    items.push_back({key_of(piece), piece.values.dtype(), piece.values.shape(),
                     piece.values.raw()});
    metadata[key_of(piece)] = place_of(piece);
  }
  write_safetensors(folder + "/" + safetensors_shard_name(kStem, rank, ranks),
                    items, metadata);
  zero.group().barrier("checkpoint");
}

void load_sharded(ZeroOptimizer& zero, const std::string& folder) {
  const std::vector<SafetensorsFile> files = open_all(folder);
  const Device& host = RankContext::current().host();
  std::vector<ShardPiece> pieces;
  for (const SafetensorsFile& file : files) {
    for (const SafetensorsEntry& entry : file.entries()) {
      ShardPiece piece = piece_of(file, entry);
      // Files are mapped: the parts of other ranks are never read
      if (!zero.owns_part_of(piece.name, piece.begin, entry.shape[0])) continue;
      piece.values = Tensor::empty(entry.shape, {entry.dtype, host});
      if (!piece.values.is_meta()) {
        std::memcpy(piece.values.raw(), file.data(entry),
                    static_cast<std::size_t>(piece.values.bytes()));
      }
      pieces.push_back(std::move(piece));
    }
  }
  zero.load_shards(pieces, count_of(files[0], "steps"));
}

}  // namespace shardbook::zero
