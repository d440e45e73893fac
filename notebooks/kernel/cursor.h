#pragma once

// The name at Jupyter's cursor, which counts characters and not bytes.

#include <string>
#include <string_view>

namespace shardbook::notebook {

/// The byte at which character `position` of a text in UTF-8 begins.
std::size_t byte_of(std::string_view text, int position);

/// How many characters `text` has.
int characters_in(std::string_view text);

/// The word that ends at byte `at`: a part of an identifier, or nothing.
std::string_view word_before(std::string_view text, std::size_t at);

/// The qualified name that ends at byte `at`, such as shardbook::Ten or x.sha.
std::string name_before(std::string_view text, std::size_t at);

/// The same, to the end of the word.
std::string name_around(std::string_view text, std::size_t at);

}  // namespace shardbook::notebook
