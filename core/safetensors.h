#pragma once

// Reading and writing safetensors, the file format of weights.
//
// A file is a header and then the bytes of the tensors, end to end:
//
//   8 bytes      n bytes of JSON, padded with spaces             the rest
//   n (u64 LE)   {"bias":{"dtype":"F32","shape":[2],             data
//                 "data_offsets":[0,8]}, "__metadata__":{...}}
//
// Nothing here knows of tensors: an entry says where bytes lie and what they
// mean, and the code that loads a model copies them from there.
//
//   SafetensorsFile file = SafetensorsFile::open("model.safetensors");
//   const SafetensorsEntry& entry = file.find("wte.weight");
//   std::memcpy(weights, file.data(entry), entry.end - entry.begin);
//
// Reading. A file is validated completely before the first byte of data is
// handed out, and mapped rather than copied. Pages are read when touched, so a
// rank that needs one shard reads one shard. A mapped file must not be cut
// short by others; the writers here replace files and never cut them.
//
// Writing. A file appears under its name whole or not at all: it is written
// under a temporary name in the same folder, synced, and renamed. When any of
// this fails, the temporary file is removed, the previous file stays as it was,
// and the Error names the path and the cause.
//
// Threads: const members may be called from several threads at once. Copies of
// a reader share one mapping, which lives as long as the last of them.
//
// https://github.com/huggingface/safetensors, section "Format".

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace shardbook {

/// One tensor of a file. `begin` and `end` are bytes from the start of the
/// data section.
struct SafetensorsEntry {
  std::string name;
  /// Valid only when `supported`; other types are listed, but not handed out.
  DType dtype = DType::kF32;
  bool supported = true;
  /// The element type as the file spells it: "F32", "BOOL", "F8_E4M3".
  std::string type_name;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Free text that travels with a file, under the key `__metadata__`.
using SafetensorsMetadata = std::map<std::string, std::string>;

/// A validated safetensors file, open for reading.
class SafetensorsFile {
 public:
  /// Maps the file and validates it. Cost: reads the header only.
  ///
  /// Throws shardbook::Error, which names the path, the tensor, the value and
  /// what is allowed, when the file cannot be read; when the header is not 1 to
  /// 100 000 000 bytes of JSON; when a key is missing, unknown, repeated or of
  /// the wrong type; when a shape and its byte range disagree; or when the
  /// ranges overlap or do not cover the data section exactly.
  static SafetensorsFile open(const std::string& path);

  /// The same for bytes in memory, which must outlive the result and all its
  /// copies. `label` stands for the path in messages.
  static SafetensorsFile view(const void* bytes, std::size_t size,
                              const std::string& label);

  /// All tensors, in the order of their bytes, unsupported ones included.
  const std::vector<SafetensorsEntry>& entries() const;
  bool contains(const std::string& name) const;
  /// Throws Error when there is no such tensor, or its type is unsupported.
  const SafetensorsEntry& find(const std::string& name) const;
  const SafetensorsMetadata& metadata() const;
  /// The path that was opened.
  const std::string& path() const;

  /// The bytes of one of this file's entries, little endian, row-major. Other
  /// programs do not align them: copy them out. Throws Error when the type is
  /// unsupported or the range is not in this file.
  const void* data(const SafetensorsEntry& entry) const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

/// A tensor to write. `data` points to as many bytes as dtype and shape say
/// (little endian, row-major); it may be null when there are none.
struct SafetensorsItem {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
};

/// Writes one file atomically. Tensors with larger elements come first,
/// otherwise in the order of `items`, so every tensor is aligned to its
/// element.
///
/// Throws Error when a name is empty, repeated, reserved or not UTF-8, when a
/// size is negative or too large, or when the file cannot be written.
void write_safetensors(const std::string& path,
                       const std::vector<SafetensorsItem>& items,
                       const SafetensorsMetadata& metadata = {});

/// "model-00002-of-00005.safetensors" for stem "model", shard 1 of 5 (from 0).
std::string safetensors_shard_name(const std::string& stem, int shard,
                                   int num_shards);

/// The manifest of a checkpoint in several files (Hugging Face's layout): which
/// file, in the folder of the manifest, holds which tensor.
using SafetensorsIndex = std::map<std::string, std::string>;

/// Reads a manifest from memory; `label` stands for the path in messages.
SafetensorsIndex parse_safetensors_index(const void* text, std::size_t size,
                                         const std::string& label);

/// A checkpoint in one file or in many, read in the same way.
class CheckpointReader {
 public:
  /// `path` is a .safetensors file, a manifest (.json), a folder that holds
  /// model.safetensors or model.safetensors.index.json (looked for in this
  /// order), or the path of either without its ending. Opens and validates
  /// all files; throws Error when one is missing or malformed, or lacks a
  /// tensor that the manifest promises.
  static CheckpointReader open(const std::string& path);

  /// Names of all tensors: file by file, in the order of their bytes.
  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;
  /// Throws Error when there is no such tensor, or its type is unsupported.
  const SafetensorsEntry& find(const std::string& name) const;
  /// The bytes of a tensor; see SafetensorsFile::data.
  const void* data(const std::string& name) const;
  /// Metadata of all files; where they disagree, the first file wins.
  const SafetensorsMetadata& metadata() const;

 private:
  struct Impl;
  explicit CheckpointReader(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace shardbook
