#include "notebooks/kernel/tokens.h"

#include <cctype>
#include <cstddef>

namespace shardbook::notebook {
namespace {

bool starts_word(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_';
}

bool in_word(char c) {
  return starts_word(c) || std::isdigit(static_cast<unsigned char>(c));
}

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }

/// Reads one token after the other.
class Reader {
 public:
  explicit Reader(std::string_view cell) : cell_(cell) {}

  Tokens read() {
    while (skip_to_token()) {
      const std::size_t begin = at_;
      const int line = line_;
      const TokenKind kind = read_token();
      at_line_start_ = false;
      tokens_.list.push_back({kind, cell_.substr(begin, at_ - begin), line});
    }
    return tokens_;
  }

 private:
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < cell_.size() ? cell_[at_ + ahead] : '\0';
  }

  bool sees(std::string_view text) const {
    return cell_.substr(at_, text.size()) == text;
  }

  void step() {
    if (at_ >= cell_.size()) return;
    if (cell_[at_] == '\n') {
      ++line_;
      at_line_start_ = true;
    }
    ++at_;
  }

  void step_over(std::size_t count) {
    for (; count > 0; --count) step();
  }

  /// Stops after `end`. A cell without it is unfinished.
  void step_behind(std::string_view end) {
    while (at_ < cell_.size() && !sees(end)) step();
    if (at_ >= cell_.size()) tokens_.unfinished = true;
    step_over(end.size());
  }

  bool skip_to_token() {
    while (at_ < cell_.size()) {
      if (sees("//")) {
        while (at_ < cell_.size() && peek() != '\n') step();
      } else if (sees("/*")) {
        step_over(2);
        step_behind("*/");
      } else if (is_space(peek())) {
        step();
      } else {
        return true;
      }
    }
    return false;
  }

  TokenKind read_token() {
    if (peek() == '#' && at_line_start_) return read_directive();
    if (peek() == '"' || peek() == '\'') return read_quoted(peek());
    if (std::isdigit(static_cast<unsigned char>(peek()))) {
      // 1'000, 0x1p-3, 1e+5
      while (in_word(peek()) || peek() == '.' || peek() == '\'' ||
             ((peek() == '+' || peek() == '-') && is_exponent(cell_[at_ - 1])))
        step();
      return TokenKind::kNumber;
    }
    if (starts_word(peek())) return read_word();
    for (const std::string_view two : {"::", "->", "[[", "]]"}) {
      if (!sees(two)) continue;
      step_over(2);
      return TokenKind::kSymbol;
    }
    step();
    return TokenKind::kSymbol;
  }

  static bool is_exponent(char c) {
    return c == 'e' || c == 'E' || c == 'p' || c == 'P';
  }

  TokenKind read_directive() {
    while (at_ < cell_.size() && peek() != '\n') {
      if (peek() == '\\' && peek(1) == '\n') step();
      step();
    }
    return TokenKind::kDirective;
  }

  TokenKind read_quoted(char quote) {
    step();
    while (at_ < cell_.size() && peek() != quote && peek() != '\n') {
      if (peek() == '\\') step();
      step();
    }
    if (peek() != quote) tokens_.unfinished = true;
    step();
    return TokenKind::kText;
  }

  /// A word, or a literal with a prefix: R"(...)", u8"...".
  TokenKind read_word() {
    const std::size_t begin = at_;
    while (in_word(peek())) step();
    const std::string_view word = cell_.substr(begin, at_ - begin);
    const bool is_prefix = word == "R" || word == "L" || word == "u" ||
                           word == "U" || word == "u8" || word == "LR" ||
                           word == "uR" || word == "UR" || word == "u8R";
    if (!is_prefix || peek() != '"') return TokenKind::kWord;
    if (word.back() != 'R') return read_quoted('"');
    const std::size_t open = cell_.find('(', at_);
    if (open == std::string_view::npos) {
      tokens_.unfinished = true;
      step_over(cell_.size() - at_);
      return TokenKind::kText;
    }
    const std::string end =
        ")" + std::string(cell_.substr(at_ + 1, open - at_ - 1)) + "\"";
    step_behind(end);
    return TokenKind::kText;
  }

  std::string_view cell_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  Tokens tokens_;
};

}  // namespace

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
