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

namespace shardbook::notebook {

enum class CellKind { kEmpty, kDirectives, kNamespaces, kStatements, kRefused };

struct CellOutline {
  CellKind kind = CellKind::kEmpty;
  std::string reason = {};  ///< of a refused cell: one sentence
  int line = 0;             ///< where the reason lies, counted from 1
};

CellOutline outline_of(std::string_view cell);

/// For Jupyter's console: "complete", "incomplete" or "invalid".
std::string completeness_of(std::string_view cell);

}  // namespace shardbook::notebook
