#include "notebooks/kernel/cell_grammar.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

namespace shardbook::notebook {
namespace {

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }
bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }

bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

bool is_sign_of_exponent(char before, char c) {
  constexpr std::string_view kExponents = "eEpP", kSigns = "+-";
  return kExponents.find(before) != std::string_view::npos &&
         kSigns.find(c) != std::string_view::npos;
}

/// Reads one token after the other.
class Reader {
 public:
  explicit Reader(std::string_view cell) : cell_(cell) {}

  Tokens read() {
    for (std::size_t end = 0; skip_to_token(); end = at_) {
      const std::size_t begin = at_;
      const bool begins_line =
          end == 0 ||
          cell_.substr(end, begin - end).find('\n') != std::string_view::npos;
      const TokenKind kind = read_token(begins_line);
      tokens_.list.push_back({kind, cell_.substr(begin, at_ - begin)});
    }
    return tokens_;
  }

 private:
  char peek() const { return at_ < cell_.size() ? cell_[at_] : '\0'; }

  bool sees(std::string_view text) const {
    return cell_.substr(at_, text.size()) == text;
  }

  void go_to_end_of_line() {
    at_ = std::min(cell_.find('\n', at_), cell_.size());
  }

  /// Stops after `end`. A cell without it is unfinished.
  void go_behind(std::string_view end) {
    const std::size_t found = cell_.find(end, at_);
    const bool is_missing = found == std::string_view::npos;
    if (is_missing) tokens_.unfinished = true;
    at_ = is_missing ? cell_.size() : found + end.size();
  }

  bool skip_to_token() {
    while (at_ < cell_.size()) {
      if (sees("//")) {
        go_to_end_of_line();
      } else if (sees("/*")) {
        at_ += 2;
        go_behind("*/");
      } else if (is_space(peek())) {
        ++at_;
      } else {
        return true;
      }
    }
    return false;
  }

  TokenKind read_token(bool begins_line) {
    const char first = peek();
    if (first == '#' && begins_line) return read_directive();
    if (first == '"' || first == '\'') return read_quoted(first);
    if (is_digit(first)) {
      // 1'000, 0x1p-3, 1e+5
      while (in_word(peek()) || peek() == '.' || peek() == '\'' ||
             is_sign_of_exponent(cell_[at_ - 1], peek())) {
        ++at_;
      }
      return TokenKind::kNumber;
    }
    if (in_word(first)) return read_word();
    const bool has_two = sees("::") || sees("->") || sees("[[") || sees("]]");
    at_ += has_two ? 2 : 1;
    return TokenKind::kSymbol;
  }

  TokenKind read_directive() {
    go_to_end_of_line();
    while (at_ < cell_.size() && cell_[at_ - 1] == '\\') {
      ++at_;
      go_to_end_of_line();
    }
    return TokenKind::kDirective;
  }

  TokenKind read_quoted(char quote) {
    for (++at_; peek() != quote && peek() != '\n' && at_ < cell_.size();
         ++at_) {
      if (peek() == '\\') ++at_;
    }
    if (peek() != quote) tokens_.unfinished = true;
    at_ = std::min(at_ + 1, cell_.size());
    return TokenKind::kText;
  }

  /// A word, or a literal with a prefix: R"(...)", u8"...".
  TokenKind read_word() {
    const std::size_t begin = at_;
    while (in_word(peek())) ++at_;
    const std::string_view word = cell_.substr(begin, at_ - begin);
    constexpr std::string_view kPrefixes[] = {"R",  "L",  "u",  "U",  "u8",
                                              "LR", "uR", "UR", "u8R"};
    const bool is_prefix = std::find(std::begin(kPrefixes), std::end(kPrefixes),
                                     word) != std::end(kPrefixes);
    if (!is_prefix || peek() != '"') return TokenKind::kWord;
    if (word.back() != 'R') return read_quoted('"');
    const auto delimiter =
        cell_.substr(at_ + 1, cell_.find('(', at_) - at_ - 1);
    go_behind(")" + std::string(delimiter) + "\"");
    return TokenKind::kText;
  }

  std::string_view cell_;
  std::size_t at_ = 0;
  Tokens tokens_;
};

}  // namespace

std::string_view last_word(std::string_view text) {
  std::size_t begin = text.size();
  while (begin > 0 && in_word(text[begin - 1])) --begin;
  return text.substr(begin);
}

int depth_of(const Token& token) {
  if (token.kind != TokenKind::kSymbol) return 0;
  const std::size_t bracket = std::string_view("({[)}]").find(token.text[0]);
  const int size = static_cast<int>(token.text.size());
  return bracket == std::string_view::npos ? 0 : bracket < 3 ? size : -size;
}

Tokens tokens_of(std::string_view cell) {
  Tokens tokens = Reader(cell).read();
  int depth = 0;
  for (const Token& token : tokens.list) depth += depth_of(token);
  if (depth > 0) tokens.unfinished = true;
  return tokens;
}

}  // namespace shardbook::notebook
