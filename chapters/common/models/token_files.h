#pragma once

// Files of --data: bytes of text, or token ids as other programs write them.
//
//   FILE.npy             NumPy's; rows of more dimensions are joined
//   FILE.u16, FILE.u32   little-endian ids without a header
//   llm.c's .bin         256 32-bit integers (a magic number, a version, the
//                        number of ids), then ids of 16 (GPT-2) or 32 bits
//   Megatron-LM's .bin   ids alone; FILE.idx beside it has their type, and the
//                        sequences and documents, which are joined
//
// nanoGPT's .bin has 16-bit ids without a header, so only --data-format u16 can
// tell. All else is text, unless it has a zero byte.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shardbook {

/// A file's name, the start of its content, and its size. A format is known
/// from the first kTokenFileStart bytes.
struct TokenFile {
  std::string path;  ///< as the user gave it
  std::string_view start;
  std::uint64_t bytes = 0;
  /// The whole FILE.idx beside a FILE.bin.
  std::optional<std::string> index;
};
constexpr std::size_t kTokenFileStart = 4096;

/// How token ids lie in a file.
struct TokenLayout {
  int width = 1;  ///< bytes of an id
  bool is_signed = false;
  bool is_big_endian = false;
  std::int64_t count = 0;
  std::size_t offset = 0;  ///< of the first id
  bool is_text = false;    ///< each byte is an id
  /// The dimensions of an array whose first index runs fastest in the file.
  std::vector<std::int64_t> fortran_shape;
  /// Who wrote it, and what is joined: "llm.c", "NumPy, rows of [10, 64]
  /// joined"; may be empty.
  std::string origin;
};

/// Recognises a file. `format` is that of --data-format: "auto", "bytes", "u16"
/// or "u32". Throws Error that names the file, where a header contradicts
/// itself, the file's size or `format`.
TokenLayout token_layout(const TokenFile& file, const std::string& format);

/// The ids of a whole file. Throws Error for an id below 0 or above 2^31 - 1,
/// with its position, and for text that is none: a zero byte, or a .txt, .md or
/// .bin that is not UTF-8. `format` is "bytes" where any byte is welcome.
std::vector<std::int32_t> token_ids(const std::string& path,
                                    std::string_view content,
                                    const TokenLayout& layout,
                                    const std::string& format);

/// Reads a file of --data: token_layout and token_ids. Throws Error also for a
/// file that is missing, empty, a folder, or cannot be read.
std::vector<std::int32_t> read_tokens(const std::string& path,
                                      const std::string& format);

/// "2000 token ids (u16, llm.c)", from the file's header; empty for text.
std::string describe_tokens(const std::string& path, const std::string& format);

}  // namespace shardbook
