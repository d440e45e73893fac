#pragma once

// What a cell may contain. A cell is one of three kinds:
//
//   directives   #include lines, #pragma cling lines
//   namespaces   namespace blocks: functions, classes, loops, lambdas
//   statements   declarations and expressions, each ended by a semicolon
//
// xeus-cling (cling 0.9) decides by the first token of a cell whether the cell
// becomes the body of a function, so a cell that mixes kinds fails there. Cells
// that follow the grammar run there, in xeus-cpp, and in the book's own kernel,
// which refuses all others: a laxer kernel would hide the mistake.

#include <string>
#include <string_view>
#include <vector>

namespace shardbook::notebook {

// --- Its tokens: enough to see its outline without a compiler -----------------

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

// --- Its outline --------------------------------------------------------------

enum class CellKind { kEmpty, kDirectives, kNamespaces, kStatements, kRefused };

struct CellOutline {
  CellKind kind = CellKind::kEmpty;
  std::string reason = {};  ///< of a refused cell: one sentence
  int line = 0;             ///< where the reason lies, counted from 1
};

CellOutline outline_of(std::string_view cell);

/// For Jupyter's console: "complete", "incomplete" or "invalid".
std::string completeness_of(std::string_view cell);

/// A #pragma cling line, which clang does not know.
struct Directive {
  std::string verb = {};   ///< add_include_path, add_library_path or load
  std::string value = {};  ///< a path, or the name of a library
};

struct Directives {
  std::vector<Directive> list = {};
  std::string rest = {};   ///< the cell with these lines left empty
  std::string error = {};  ///< one sentence about the first unknown pragma
};

Directives directives_of(std::string_view cell);

/// The file that load("name") means: `name` itself, name.so, or either in one
/// of `folders`. Empty when there is none.
std::string find_library(const std::string& name,
                         const std::vector<std::string>& folders);

}  // namespace shardbook::notebook
