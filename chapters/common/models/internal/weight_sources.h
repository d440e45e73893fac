#pragma once

// From the tensors of a file to those of a model: by which names they are found,
// how they must agree, and how their values are read.

#include <map>
#include <string>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/internal/llama_files.h"
#include "core/safetensors.h"

namespace shardbook {

/// Opens the file of --load, which messages name.
CheckpointReader open_to_load(const std::string& path);

/// Finds a model's tensors in a file by the names that files may have for them.
class FileNames {
 public:
  /// Names in a file may lack `prefix`.
  FileNames(const CheckpointReader& file, const std::string& path,
            const std::string& prefix);
  /// The file's name of this tensor; empty where it has none.
  std::string find(const std::string& name) const;
  /// The same; throws Error where it has none.
  std::string at(const std::string& name) const;
  /// All names, without wrappers; those that begin with `first_part` get the
  /// prefix that they lack.
  std::vector<std::string> plain_names(const std::string& first_part) const;

 private:
  std::string path_, prefix_;
  std::map<std::string, std::string> by_plain_name_;
};

/// Throws Error where the file has an output layer other than its token embedding
/// `table`: the model's is the table, and the file's would be ignored.
void check_is_tied(const CheckpointReader& file, const std::string& path,
                   const FileNames& names, const std::string& table);

/// Throws Error where a folder has one file and shards: transformers takes the
/// one file, which may be older.
void check_is_one_model(const std::string& path);

/// Throws Error for a weight of a block that this model of the Llama family has
/// not, and would drop: a bias, a norm, a further block or expert.
void check_has_no_more(const ModelConfig& config, const std::string& path,
                       const FileNames& names);

/// A tensor to fill, and where its values are in a file.
struct WeightSource {
  Tensor target;
  TensorInFiles whole;
  PartOfFile part;
};

WeightSource source_of_llama(const ModelConfig& config,
                             const NamedTensor& target, const PartOfFile& part);

/// Throws Error where a tensor of the file has another shape, or no floating
/// dtype.
void check_piece(const CheckpointReader& file, const std::string& path,
                 const WeightSource& source, const FilePiece& piece);

/// The values of the target, on the host and in the dtype of the file: reading
/// them counts for no device.
Tensor read_source(const CheckpointReader& file, const WeightSource& source);

}  // namespace shardbook
