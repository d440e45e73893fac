#include "notebooks/kernel/cursor.h"

#include <cctype>

namespace shardbook::notebook {
namespace {

bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

bool continues_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

/// The number of bytes of the separator (:: -> .) that ends at `at`.
std::size_t separator_before(std::string_view text, std::size_t at) {
  if (at >= 2 &&
      (text.substr(at - 2, 2) == "::" || text.substr(at - 2, 2) == "->")) {
    return 2;
  }
  return at >= 1 && text[at - 1] == '.' ? 1 : 0;
}

}  // namespace

std::size_t byte_of(std::string_view text, int position) {
  std::size_t at = 0;
  for (; at < text.size() && position > 0; --position) {
    ++at;
    while (at < text.size() && continues_character(text[at])) ++at;
  }
  return at;
}

int characters_in(std::string_view text) {
  int count = 0;
  for (const char c : text) count += !continues_character(c);
  return count;
}

std::string_view word_before(std::string_view text, std::size_t at) {
  std::size_t begin = at;
  while (begin > 0 && in_word(text[begin - 1])) --begin;
  return text.substr(begin, at - begin);
}

std::string name_before(std::string_view text, std::size_t at) {
  std::size_t begin = at - word_before(text, at).size();
  while (const std::size_t size = separator_before(text, begin)) {
    const std::size_t before = word_before(text, begin - size).size();
    if (before == 0) break;
    begin -= size + before;
  }
  return std::string(text.substr(begin, at - begin));
}

std::string name_around(std::string_view text, std::size_t at) {
  while (at < text.size() && in_word(text[at])) ++at;
  return name_before(text, at);
}

}  // namespace shardbook::notebook
