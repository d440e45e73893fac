#pragma once

// What the readers of --data's files share: names, integers, and what is no text.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace shardbook::data_files {

/// The beginning of messages.
std::string label_of(const std::string& path);

/// The path's extension in small letters: ".npy".
std::string ending_of(const std::string& path);

/// A little-endian integer of `width` bytes, or a big-endian one.
std::uint64_t integer_at(std::string_view bytes, std::size_t at, int width,
                         bool is_big_endian = false);

/// Throws Error that says what the file is and what to give in its place: for a
/// zero byte, for another program's binary file, and for a .txt, .md or .bin
/// that is not UTF-8.
void check_text(const std::string& path, std::string_view content);

}  // namespace shardbook::data_files
