#include "chapters/common/run/state_files.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "chapters/common/models/checkpoint.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kStem[] = "rank";

/// The shape that the part's shards cut.
Shape padded(const StatePart& part) {
  Shape whole = part.whole;
  if (part.padded_rows > 0) whole[0] = part.padded_rows;
  return whole;
}

// Identifies the elements of a tensor: equal on ranks that hold the same.
Json place_of(const StatePart& part, std::int64_t count) {
  Json shards = Json::array();
  for (const Shard& each : part.shards) {
    if (each.count == 1) continue;
    Json shard = {each.dim, each.index, each.count, each.blocks, each.length};
    Json columns = Json::array();
    for (const Columns& some : each.columns) {
      columns.push_back({some.width, some.parts});
    }
    if (!columns.empty()) shard.push_back(columns);
    shards.push_back(shard);
  }
  return {{"whole", part.whole},
          {"padded_rows", part.padded_rows},
          {"shards", shards},
          {"begin", part.begin},
          {"count", count}};
}

std::string key_of(const StatePart& part, const std::string& field) {
  return field + ":" + part.name + " " +
         place_of(part, part.values.numel()).dump();
}

// FNV-1a over words of eight bytes: detects bits that a disk has corrupted.
std::string sum_of(const void* data, std::size_t bytes) {
  std::uint64_t sum = 14695981039346656037u;
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    std::uint64_t word = 0;
    const std::size_t n = std::min<std::size_t>(bytes, sizeof(word));
    std::memcpy(&word, next, n);
    sum = (sum ^ word) * 1099511628211u;
    sum ^= sum >> 32;
    next += n;
    bytes -= n;
  }
  std::ostringstream text;
  text << std::hex << sum;
  return text.str();
}

// Chooses which of its pieces (key and bytes) a rank writes: of several
// holders, the one with the least to write so far writes a piece.
std::set<std::string> own_keys(
    const std::map<std::string, std::int64_t>& pieces, ProcessGroup* world) {
  std::string mine;
  for (const auto& [key, bytes] : pieces) {
    mine += std::to_string(bytes) + " " + key + "\n";
  }
  struct Holders {
    double bytes = 0;
    std::vector<std::size_t> ranks;
  };
  std::map<std::string, Holders> holders;
  std::vector<std::string> all = {mine};
  if (world != nullptr) all = world->exchange(mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream lines(all[rank]);
    Holders here;
    for (std::string key; lines >> here.bytes && lines.get() == ' ' &&
                          std::getline(lines, key);) {
      holders[key].bytes = here.bytes;
      holders[key].ranks.push_back(rank);
    }
  }
  std::set<std::string> own;
  std::vector<double> load(all.size(), 0.0);
  const std::size_t here = world == nullptr ? 0 : world->rank();
  for (const auto& [key, held] : holders) {
    const std::size_t writer = *std::min_element(
        held.ranks.begin(), held.ranks.end(),
        [&](std::size_t a, std::size_t b) { return load[a] < load[b]; });
    load[writer] += held.bytes;
    if (writer == here) own.insert(key);
  }
  return own;
}

}  // namespace

void write_state_file(const std::string& folder, const TrainingState& state,
                      ProcessGroup* world) {
  const NoGrad no_grad;
  struct Field {
    std::string key, name;
    Tensor values;
    Json place;
  };
  std::vector<Field> fields;
  std::map<std::string, std::int64_t> keys;
  for (const StatePart& part : state.parts) {
    if (part.values.numel() == 0) continue;
    for (const StateField& each : fields_of(part)) {
      Json place = place_of(part, part.values.numel());
      place["updates"] = updates_of(part);
      const std::string key = key_of(part, each.name);
      keys[key] = each.values.bytes();
      fields.push_back(
          {key, each.name + ":" + part.name, each.values, std::move(place)});
    }
  }
  std::set<std::string> own = own_keys(keys, world);

  std::vector<SafetensorsItem> items;
  SafetensorsMetadata metadata;
  std::vector<Tensor> on_this_host;
  for (const Field& each : fields) {
    if (own.erase(each.key) == 0) continue;
    const Tensor values = on_host({{"", each.values}})[0].tensor;
    on_this_host.push_back(values);
    // Several pieces of one tensor have a number each
    std::string name = each.name;
    for (int i = 1; metadata.count(name) > 0; ++i) {
      name = each.name + "#" + std::to_string(i);
    }
    items.push_back({name, values.dtype(), {values.numel()}, values.raw()});
    Json place = each.place;
    place["sum"] =
        sum_of(values.raw(), static_cast<std::size_t>(values.bytes()));
    metadata[name] = place.dump();
  }
  const int rank = world == nullptr ? 0 : world->rank();
  const int size = world == nullptr ? 1 : world->size();
  write_safetensors(folder + "/" + safetensors_shard_name(kStem, rank, size),
                    items, metadata);
}

StateFiles::StateFiles(const std::string& folder, int num_ranks)
    : folder_(folder) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    files_.push_back(SafetensorsFile::open(
        folder + "/" + safetensors_shard_name(kStem, rank, num_ranks)));
    for (const SafetensorsEntry& entry : files_.back().entries()) {
      add(files_.size() - 1, entry);
    }
  }
}

void StateFiles::add(std::size_t file, const SafetensorsEntry& entry) {
  const std::string& path = files_[file].path();
  const std::size_t colon = entry.name.find(':');
  const auto found = files_[file].metadata().find(entry.name);
  SB_CHECK(colon != std::string::npos &&
               found != files_[file].metadata().end() && entry.supported,
           path, ": '", entry.name,
           "' is not named FIELD:PARAMETER, or the metadata do not know it");
  Piece piece;
  StatePart& part = piece.place;
  piece.file = file;
  piece.entry = entry;
  bool is_valid = true;
  try {
    const Json place = Json::parse(found->second);
    place.at("whole").get_to(part.whole);
    place.at("padded_rows").get_to(part.padded_rows);
    place.at("begin").get_to(part.begin);
    place.at("count").get_to(piece.count);
    place.at("updates").get_to(piece.updates);
    place.at("sum").get_to(piece.sum);
    for (const Json& each : place.at("shards")) {
      // A file may omit the length if its parts are equal, and columns
      part.shards.push_back({each.at(0), each.at(1), each.at(2), each.at(3),
                             each.size() > 4 ? each.at(4) : Json(0)});
      Shard& shard = part.shards.back();
      is_valid = is_valid && shard.count > 0 && shard.blocks > 0;
      for (const Json& some : each.size() > 5 ? each.at(5) : Json::array()) {
        shard.columns.push_back({some.at(0), some.at(1)});
        is_valid = is_valid && shard.columns.back().width > 0 &&
                   shard.columns.back().parts > 0;
      }
    }
    is_valid = is_valid &&
               (part.padded_rows == 0 ||
                (!part.whole.empty() && part.padded_rows >= part.whole[0]));
    const auto in_part =
        is_valid ? shape_numel(shape_of(part.shards, padded(part))) : 0;
    is_valid = is_valid && part.begin >= 0 &&
               part.begin + piece.count <= in_part &&
               entry.shape == Shape{piece.count};
  } catch (const std::exception&) {
    is_valid = false;
  }
  SB_CHECK(is_valid, path, ": the metadata of '", entry.name,
           "' do not say which elements it has: ", found->second);
  std::string name = entry.name.substr(colon + 1);
  name = name.substr(0, name.find('#'));
  pieces_[{name, entry.name.substr(0, colon)}].push_back(std::move(piece));
}

const StateFiles::Pieces& StateFiles::pieces(const std::string& name,
                                             const std::string& field) const {
  static const Pieces kNone;
  const auto found = pieces_.find({name, field});
  return found == pieces_.end() ? kNone : found->second;
}

std::vector<std::string> StateFiles::names() const {
  std::vector<std::string> names;
  for (const auto& [key, unused] : pieces_) {
    if (key.second == "parameter") names.push_back(key.first);
  }
  return names;
}

std::int64_t StateFiles::updates(const std::string& name) const {
  std::int64_t most = 0;
  for (const Piece& each : pieces(name, "parameter")) {
    most = std::max(most, each.updates);
  }
  return most;
}

void StateFiles::check(const TrainingState& state, bool with_optimizer) const {
  for (const StatePart& part : state.parts) {
    // The fields that the part has after loading
    std::set<std::string> fields;
    std::map<std::string, DType> dtypes;
    for (const StateField& each : fields_of(part)) {
      if (each.name != "parameter" && !with_optimizer) continue;
      fields.insert(each.name);
      dtypes.emplace(each.name, each.values.dtype());
    }
    if (with_optimizer && part.optimizer != nullptr && updates(part.name) > 0) {
      for (const std::string& name : part.optimizer->state_names()) {
        fields.insert(name);
      }
    }
    for (const std::string& field : fields) {
      const Pieces& found = pieces(part.name, field);
      SB_CHECK(!found.empty(), folder_, ": holds no ", field, " of '",
               part.name, "', which this run needs");
      for (const Piece& each : found) {
        SB_CHECK(each.place.whole == part.whole, folder_, ": '", part.name,
                 "' has shape ", shape_text(each.place.whole),
                 ", this run needs ", shape_text(part.whole));
        SB_CHECK(
            dtypes.count(field) == 0 || dtypes.at(field) == each.entry.dtype,
            folder_, ": ", field, " of '", part.name, "' is ",
            each.entry.type_name, ", this run needs ",
            dtype_name(dtypes.at(field)));
      }
      std::int64_t elements = 0;  // replicas are written once
      for (const Piece& each : found) elements += each.count;
      SB_CHECK(elements >= shape_numel(part.whole), folder_, ": holds ",
               elements, " of the ", shape_numel(part.whole), " elements of ",
               field, " of '", part.name, "'");
    }
    for (const auto& [key, unused] : pieces_) {
      SB_CHECK(!with_optimizer || key.first != part.name ||
                   fields.count(key.second) > 0,
               folder_, ": holds ", key.second, " of '", part.name,
               "', which this run does not keep");
    }
  }
}

const void* StateFiles::bytes(const Piece& piece) const {
  const SafetensorsFile& file = files_[piece.file];
  const void* data = file.data(piece.entry);
  const auto size =
      static_cast<std::size_t>(piece.entry.end - piece.entry.begin);
  SB_CHECK(sum_of(data, size) == piece.sum, file.path(), ": '",
           piece.entry.name,
           "' is damaged: its bytes are not those that were written");
  return data;
}

// The part's elements of one field, on the host.
Tensor StateFiles::assemble(const StatePart& part,
                            const StateField& field) const {
  const Pieces& found = pieces(part.name, field.name);
  Tensor own =
      Tensor::empty(field.values.shape(),
                    {field.values.dtype(), RankContext::current().host()});
  const auto element = static_cast<std::int64_t>(dtype_bytes(own.dtype()));
  const auto count = own.numel();
  const Json place = place_of(part, count);
  // The mesh that wrote had the same cut: one piece is the part
  for (const Piece& each : found) {
    if (place_of(each.place, each.count) != place) continue;
    std::memcpy(own.raw(), bytes(each),
                static_cast<std::size_t>(count * element));
    return own;
  }

  // Another mesh: put the whole together, then take the part
  const std::int64_t numel = shape_numel(part.whole);
  std::vector<char> whole(static_cast<std::size_t>(numel * element));
  std::vector<bool> is_there(static_cast<std::size_t>(numel));
  for (const Piece& each : found) {
    const char* data = static_cast<const char*>(bytes(each));
    for (const IndexRun& run : flat_runs(each.place.shards, padded(each.place),
                                         each.place.begin, each.count)) {
      // Padding lies behind the elements of the whole
      const std::int64_t n = std::min(run.count, numel - run.begin);
      if (n > 0) {
        std::memcpy(whole.data() + run.begin * element, data,
                    static_cast<std::size_t>(n * element));
        std::fill_n(is_there.begin() + run.begin, n, true);
      }
      data += run.count * element;
    }
  }
  own.copy_from(field.values);  // padding stays as it is here
  char* next = static_cast<char*>(own.raw());
  for (const IndexRun& run :
       flat_runs(part.shards, padded(part), part.begin, count)) {
    const std::int64_t n = std::min(run.count, numel - run.begin);
    for (std::int64_t i = run.begin; i < run.begin + n; ++i) {
      SB_CHECK(is_there[static_cast<std::size_t>(i)], folder_,
               ": no file holds element ", i, " of ", field.name, " of '",
               part.name, "'");
    }
    if (n > 0) {
      std::memcpy(next, whole.data() + run.begin * element,
                  static_cast<std::size_t>(n * element));
    }
    next += run.count * element;
  }
  return own;
}

void StateFiles::load(const TrainingState& state, bool with_optimizer) const {
  const NoGrad no_grad;
  for (const StatePart& part : state.parts) {
    if (with_optimizer) make_optimizer_state(part, updates(part.name));
    for (const StateField& field : fields_of(part)) {
      const bool is_left = field.name != "parameter" && !with_optimizer;
      if (is_left || field.values.is_meta() || field.values.numel() == 0) {
        continue;
      }
      field.values.copy_from(assemble(part, field));
    }
  }
}

}  // namespace shardbook
