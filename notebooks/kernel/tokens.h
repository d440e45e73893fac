#pragma once

// A cell, cut into the tokens of C++. This is enough to see the outline of a
// cell (directives, blocks, statements) without a compiler.

#include <string>
#include <string_view>
#include <vector>

namespace shardbook::notebook {

enum class TokenKind { kWord, kNumber, kText, kSymbol, kDirective };

/// A word is an identifier or a keyword. A text is a literal in quotes; a
/// directive is a whole line that begins with #, with its continuation lines.
struct Token {
  TokenKind kind = TokenKind::kSymbol;
  std::string_view text = {};  ///< a part of the cell
};

/// The change of bracket depth at a token: 1 for ( { [, 2 for [[, -1 for ) } ],
/// -2 for ]], 0 for all others.
int depth_of(const Token& token);

/// A cell that ends within a comment, a literal or a bracket is unfinished.
struct Tokens {
  std::vector<Token> list = {};
  bool unfinished = false;
};

/// Comments and white space are dropped. Symbols have one character, except
/// :: -> and [[ ]], which have two. The tokens refer to `cell`.
Tokens tokens_of(std::string_view cell);

/// The word that ends a text: a part of an identifier, or nothing.
std::string_view last_word(std::string_view text);

}  // namespace shardbook::notebook
