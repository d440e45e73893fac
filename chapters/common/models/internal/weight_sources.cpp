#include "chapters/common/models/internal/weight_sources.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "chapters/common/models/internal/weight_names.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {

CheckpointReader open_to_load(const std::string& path) {
  try {
    return CheckpointReader::open(path);
  } catch (const Error& error) {
    SB_FAIL("--load ", error.what());  // which begins with the path
  }
}

FileNames::FileNames(const CheckpointReader& file, const std::string& path,
                     const std::string& prefix)
    : path_(path), prefix_(prefix) {
  for (const std::string& name : file.names()) {
    const std::string plain = without_wrappers(name);
    std::string& found = by_plain_name_[plain];
    // Where the file has both, the one without wrappers counts
    if (found.empty() || name == plain) found = name;
  }
}

std::string FileNames::find(const std::string& name) const {
  const bool has_prefix = name.compare(0, prefix_.size(), prefix_) == 0;
  for (const std::string& plain :
       {name, has_prefix ? name.substr(prefix_.size()) : "",
        resnet_name_in_transformers(name)}) {
    const auto found = by_plain_name_.find(plain);
    if (!plain.empty() && found != by_plain_name_.end()) return found->second;
  }
  return "";
}

std::string FileNames::at(const std::string& name) const {
  const std::string found = find(name);
  if (!found.empty()) return found;
  std::string some;
  int listed = 0;
  for (const auto& [plain, there] : by_plain_name_) {
    if (++listed > 3) break;
    some += (some.empty() ? "'" : ", '") + there + "'";
  }
  SB_FAIL("--load ", path_, ": no tensor is named '", name, "'; of ",
          by_plain_name_.size(), " names the first are ", some);
}

std::vector<std::string> FileNames::plain_names(
    const std::string& first_part) const {
  std::vector<std::string> names;
  for (const auto& [plain, there] : by_plain_name_) {
    const bool lacks_prefix =
        plain.compare(0, first_part.size(), first_part) == 0;
    names.push_back(lacks_prefix ? prefix_ + plain : plain);
  }
  return names;
}

void check_is_tied(const CheckpointReader& file, const std::string& path,
                   const FileNames& names, const std::string& table) {
  const std::string head = names.find("lm_head.weight"),
                    wte = names.find(table);
  if (head.empty() || wte.empty()) return;
  const SafetensorsEntry &a = file.find(head), &b = file.find(wte);
  SB_CHECK(a.shape == b.shape && a.dtype == b.dtype &&
               std::memcmp(file.data(head), file.data(wte),
                           static_cast<std::size_t>(a.end - a.begin)) == 0,
           "--load ", path, ": '", head, "' differs from '", wte,
           "', but the output layer has the weights of the token embedding "
           "here");
}

void check_is_one_model(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string stem = fs::is_directory(path, ignored)
                               ? (fs::path(path) / "model").string()
                               : path;
  const auto has = [&](const char* ending) {
    return fs::is_regular_file(stem + ending, ignored);
  };
  SB_CHECK(!has(".safetensors") || !has(".safetensors.index.json"), "--load ",
           path,
           ": there are model.safetensors, which transformers would take, and "
           "model.safetensors.index.json, which may be another model; give the "
           "path of one of them");
}

void check_has_no_more(const ModelConfig& config, const std::string& path,
                       const FileNames& names) {
  const std::string layers = "model.layers.";
  std::set<std::string> known;
  for (const TensorInFiles& weight : llama_weights(config)) {
    for (const FilePiece& piece : weight.pieces) known.insert(piece.name);
  }
  for (const std::string& name : names.plain_names("layers.")) {
    const bool is_of_block = name.compare(0, layers.size(), layers) == 0;
    // Older programs have constants beside the weights
    const bool is_constant = name.find("rotary_emb.inv_freq") != name.npos;
    SB_CHECK(!is_of_block || is_constant || known.count(name) > 0, "--load ",
             path, ": '", name, "' is in the file, and a ", config.type,
             " of this config has no such weight");
  }
}

WeightSource source_of_llama(const ModelConfig& config,
                             const NamedTensor& target,
                             const PartOfFile& part) {
  WeightSource source{target.tensor, llama_weight(config, target.name), part};
  Shape padded = source.whole.shape;
  if (part.rows > 0) padded[0] = part.rows;
  SB_CHECK(shape_of(part.shards, padded) == target.tensor.shape(), "--load: '",
           target.name, "' has shape ", shape_text(target.tensor.shape()),
           " in the model, not ", shape_text(shape_of(part.shards, padded)));
  return source;
}

void check_piece(const CheckpointReader& file, const std::string& path,
                 const WeightSource& source, const FilePiece& piece) {
  const SafetensorsEntry& entry = file.find(piece.name);
  Shape needed = source.whole.shape_in_file(piece);
  const PartOfFile& part = source.part;
  const bool is_padded = part.rows > 0 && !entry.shape.empty() &&
                         entry.shape[0] <= part.rows && needed[0] == part.rows;
  if (is_padded) needed[0] = entry.shape[0];
  SB_CHECK(entry.shape == needed, "--load ", path, ": '", piece.name,
           "' has shape ", shape_text(entry.shape), ", the model needs ",
           shape_text(needed));
  SB_CHECK(entry.supported && is_floating(entry.dtype), "--load ", path, ": '",
           piece.name, "' is ", entry.type_name,
           "; weights are F64, F32, BF16 or F16");
}

namespace {

/// The part of one tensor.
Tensor as_in_file(const CheckpointReader& file, const WeightSource& source) {
  const std::string& name = source.whole.pieces[0].name;
  const SafetensorsEntry& entry = file.find(name);
  const PartOfFile& part = source.part;
  const bool is_part = !part.shards.empty() || part.rows > 0;
  Shape shape = entry.shape;
  if (part.rows > 0) shape[0] = part.rows;
  Tensor staged =
      Tensor::zeros(shape, {entry.dtype, RankContext::current().host()});
  std::copy_n(static_cast<const std::byte*>(file.data(name)),
              entry.end - entry.begin, static_cast<std::byte*>(staged.raw()));
  return is_part ? take_part(staged, part.shards) : staged;
}

/// The part that several tensors make up, which may differ in dtype.
Tensor joined_of(const CheckpointReader& file, const WeightSource& source) {
  const Device& host = RankContext::current().host();
  const std::vector<FilePiece>& pieces = source.whole.pieces;
  DType dtype = file.find(pieces[0].name).dtype;
  for (const FilePiece& piece : pieces) {
    if (file.find(piece.name).dtype != dtype) dtype = source.target.dtype();
  }
  const Tensor staged = Tensor::zeros(source.target.shape(), {dtype, host});
  for (const FilePiece& piece : pieces) {
    const SafetensorsEntry& entry = file.find(piece.name);
    const void* values = file.data(piece.name);
    Tensor converted;
    if (entry.dtype != dtype) {
      const Tensor read = Tensor::empty(entry.shape, {entry.dtype, host});
      std::memcpy(read.raw(), values,
                  static_cast<std::size_t>(entry.end - entry.begin));
      converted = Tensor::empty(entry.shape, {dtype, host});
      converted.copy_from(read);
      values = converted.raw();
    }
    read_piece(source.whole, piece, values, source.part.shards, staged);
  }
  return staged;
}

}  // namespace

Tensor read_source(const CheckpointReader& file, const WeightSource& source) {
  return source.whole.is_plain() ? as_in_file(file, source)
                                 : joined_of(file, source);
}

}  // namespace shardbook
