#include "notebooks/kernel/cell_grammar.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <regex>
#include <span>
#include <utility>
#include <vector>

namespace shardbook::notebook {
namespace {

using Words = std::vector<std::string_view>;

/// Thrown where a cell leaves the grammar.
struct Refusal {
  std::string_view at;  ///< a part of the cell
  std::string reason;
};

[[noreturn]] void refuse(const Token& at, const std::string& reason) {
  throw Refusal{at.text, reason};
}

/// The token in quotes, as the beginning of a reason.
std::string quoted(const Token& token) {
  return "\"" + std::string(token.text) + "\"";
}

bool contains(const Words& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Index behind the bracket that closes the one at `open`.
std::size_t behind_bracket(const std::vector<Token>& tokens, std::size_t open) {
  int depth = 0;
  for (std::size_t i = open; i < tokens.size(); ++i) {
    depth += depth_of(tokens[i]);
    if (depth == 0) return i + 1;
  }
  return tokens.size();
}

// ---- Directives

void check_directives(const std::vector<Token>& tokens) {
  for (const Token& token : tokens) {
    if (token.kind != TokenKind::kDirective) {
      refuse(token,
             "a cell with #include or #pragma lines contains nothing else; "
             "move the code to a cell of its own");
    }
    std::string_view text = token.text.substr(1);
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    const std::string_view name = text.substr(0, text.find_first_of(" \t<\"("));
    if (name != "include" && name != "pragma") {
      refuse(token, "#" + std::string(name) +
                        ": of the directives, a cell may contain #include "
                        "and #pragma cling only");
    }
  }
}

// ---- Namespaces

/// The { of the namespace block that begins at `i`; tokens.size() if there is
/// no block, as in `namespace fs = std::filesystem;`.
std::size_t open_of_namespace(const std::vector<Token>& tokens, std::size_t i) {
  if (tokens[i].text == "inline") ++i;
  if (i == tokens.size() || tokens[i].text != "namespace") return tokens.size();
  for (++i; i < tokens.size(); ++i) {
    if (tokens[i].text == "{") return i;
    if (tokens[i].kind != TokenKind::kWord && tokens[i].text != "::") break;
  }
  return tokens.size();
}

bool is_namespace_block(const std::vector<Token>& tokens, std::size_t i) {
  return open_of_namespace(tokens, i) < tokens.size();
}

void check_namespaces(const std::vector<Token>& tokens) {
  for (std::size_t i = 0; i < tokens.size();) {
    if (!is_namespace_block(tokens, i)) {
      refuse(tokens[i],
             "a cell with a namespace block contains namespace blocks only; "
             "move " +
                 quoted(tokens[i]) + " and what follows to a cell of its own");
    }
    i = behind_bracket(tokens, open_of_namespace(tokens, i));
  }
}

// ---- Statements

constexpr char kMove[] = "; put it into a function in a namespace block";

void check_first(const Token& first) {
  struct Refused {
    Words words;
    std::string reason;
  };
  static const std::vector<Refused> all = {
      {{"for", "while", "do", "if", "switch", "try", "return", "goto", "break",
        "case", "continue", "else"},
       std::string(" cannot begin a statement of a cell") + kMove},
      {{"class", "struct", "union", "enum", "template", "concept"},
       ": types and templates are defined in a namespace block, in a cell of "
       "its own"},
      {{"extern"},
       " declarations belong into a header that the notebook includes"}};
  for (const auto& [words, reason] : all) {
    if (contains(words, first.text)) refuse(first, quoted(first) + reason);
  }
  if (first.text == "{") {
    refuse(first, std::string("a block { } cannot stand in a cell") + kMove);
  }
}

/// A [ begins a lambda where no value precedes it.
bool begins_lambda(const std::vector<Token>& tokens, std::size_t i) {
  if (tokens[i].text != "[") return false;
  if (i == 0) return true;
  const Token& before = tokens[i - 1];
  if (before.kind == TokenKind::kWord) {
    return before.text == "return" || before.text == "co_return";
  }
  return before.kind == TokenKind::kSymbol && before.text != ")" &&
         before.text != "]" && before.text != "}" && before.text != "]]" &&
         before.text != "&" && before.text != ">";
}

/// Tokens between the parameters of a function and its body.
bool follows_parameters(const std::vector<Token>& tokens, std::size_t begin,
                        std::size_t brace) {
  static const Words between = {"const", "noexcept", "override", "mutable"};
  std::size_t i = brace;
  while (i > begin + 1 && contains(between, tokens[i - 1].text)) --i;
  if (i > begin && tokens[i - 1].text == ")") return true;
  // auto f() -> int {
  for (std::size_t k = begin + 1; k < brace; ++k) {
    if (tokens[k].text == "=") return false;
    if (tokens[k].text == "->" && tokens[k - 1].text == ")") return true;
  }
  return false;
}

void check_word(const std::vector<Token>& tokens, std::size_t i) {
  static const Words unresolved = {"async",         "future",
                                   "promise",       "call_once",
                                   "packaged_task", "shared_future"};
  const Token& token = tokens[i];
  if (token.text == "thread_local") {
    refuse(token,
           "\"thread_local\": compiled code and cells would have different "
           "variables; use a global of a namespace");
  }
  if (i >= 2 && tokens[i - 1].text == "::" && tokens[i - 2].text == "std" &&
      contains(unresolved, token.text)) {
    refuse(token, "std::" + std::string(token.text) +
                      " does not link from a cell; use std::thread, or a "
                      "function of the book's libraries");
  }
}

/// Checks the statement that begins at `begin`; returns the index behind it.
std::size_t check_statement(const std::vector<Token>& tokens,
                            std::size_t begin) {
  check_first(tokens[begin]);
  int depth = 0;
  for (std::size_t i = begin; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    if (token.kind == TokenKind::kDirective) {
      refuse(token, "directives belong into a cell of their own");
    }
    if (begins_lambda(tokens, i)) {
      refuse(token,
             std::string("a lambda cannot stand in a statement of a cell") +
                 kMove);
    }
    if (token.text == "{" && depth == 0 &&
        follows_parameters(tokens, begin, i)) {
      refuse(token,
             "functions are defined in a namespace block, in a cell of its "
             "own");
    }
    depth += depth_of(token);
    if (depth < 0) refuse(token, quoted(token) + " closes nothing");
    if (token.text == ";" && depth == 0) return i + 1;
  }
  refuse(tokens.back(),
         "the last statement has no semicolon; to see a value, write "
         "std::cout << value << \"\\n\"; or xcpp::display(value);");
}

void check_statements(const std::vector<Token>& tokens) {
  bool has_other = false, has_using = false;
  for (std::size_t i = 0; i < tokens.size();) {
    if (is_namespace_block(tokens, i)) {
      refuse(tokens[i], "a namespace block belongs into a cell of its own");
    }
    if (tokens[i].text != "using" && tokens[i].text != "namespace") {
      has_other = true;
    } else if (has_other) {
      // cling would make it local to the function that the cell becomes.
      refuse(tokens[i], quoted(tokens[i]) +
                            " declarations come first in a cell, so that later "
                            "cells see them");
    }
    // cling makes the second one local, whatever follows it.
    if (tokens[i].text == "using" && std::exchange(has_using, true)) {
      refuse(tokens[i],
             "a cell has one \"using\" declaration at most: later cells would "
             "not see the second one; move it to a cell of its own");
    }
    i = check_statement(tokens, i);
  }
}

CellKind check(const std::vector<Token>& tokens) {
  if (tokens.empty()) return CellKind::kEmpty;
  for (std::size_t i = 0; i < tokens.size(); ++i) check_word(tokens, i);
  if (contains({"%", "!", "?"}, tokens[0].text)) {
    refuse(tokens[0],
           "magic commands (%, !, ?) are not C++; kernels differ in them");
  }
  if (tokens[0].kind == TokenKind::kDirective) {
    check_directives(tokens);
    return CellKind::kDirectives;
  }
  if (is_namespace_block(tokens, 0)) {
    check_namespaces(tokens);
    return CellKind::kNamespaces;
  }
  check_statements(tokens);
  return CellKind::kStatements;
}

}  // namespace

CellOutline outline_of(std::string_view cell) {
  try {
    return {check(tokens_of(cell).list)};
  } catch (const Refusal& refusal) {
    const auto line = std::count(cell.data(), refusal.at.data(), '\n') + 1;
    return {CellKind::kRefused, refusal.reason, static_cast<int>(line)};
  }
}

std::string completeness_of(std::string_view cell) {
  if (tokens_of(cell).unfinished) return "incomplete";
  const CellOutline outline = outline_of(cell);
  return outline.kind == CellKind::kRefused ? "invalid" : "complete";
}

Directives directives_of(std::string_view cell) {
  static const std::regex pragma(R"(#[ \t]*pragma[ \t]+(\w+)([^]*))");
  static const std::regex cling(
      R"re([ \t]*(add_include_path|add_library_path|load)[ \t]*)re"
      R"re(\([ \t]*"([^"]*)"[ \t]*\)[ \t]*(//[^]*)?)re");
  Directives found;
  found.rest = cell;
  for (const Token& token : tokens_of(cell).list) {
    if (token.kind != TokenKind::kDirective) continue;
    std::string text(token.text);
    std::smatch name;
    if (!std::regex_match(text, name, pragma)) continue;
    if (name[1] != "cling") {
      found.error = text + ": of the pragmas, only #pragma cling is known";
      return found;
    }
    const std::string rest = name[2];
    std::smatch parts;
    if (!std::regex_match(rest, parts, cling)) {
      found.error = text +
                    ": #pragma cling knows add_include_path(\"...\"), "
                    "add_library_path(\"...\") and load(\"...\")";
      return found;
    }
    found.list.push_back({parts[1], parts[2]});
    for (char& c :
         std::span(found.rest)
             .subspan(token.text.data() - cell.data(), token.text.size())) {
      if (c != '\n') c = ' ';
    }
  }
  return found;
}

std::string find_library(const std::string& name,
                         const std::vector<std::string>& folders) {
  namespace fs = std::filesystem;
  std::vector<std::string> beginnings = {""};
  for (const std::string& folder : folders) beginnings.push_back(folder + "/");
  for (const std::string& beginning : beginnings) {
    for (const char* end : {"", ".so"}) {
      const fs::path file = beginning + name + end;
      std::error_code ignored;
      if (fs::is_regular_file(file, ignored))
        return fs::absolute(file).string();
    }
  }
  return {};
}

}  // namespace shardbook::notebook
