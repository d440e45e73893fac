#pragma once

// The compiler of cells: clang's interpreter, which compiles one piece of C++
// after the other into this process.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace clang {
class Interpreter;
}  // namespace clang

namespace shardbook::notebook {

/// A cell failed; `name` and `text` are what Jupyter shows.
struct CellError {
  std::string name = {};
  std::string text = {};
};

class Compiler {
 public:
  /// `arguments` are clang's, as in {"-std=c++17", "-O2"}.
  explicit Compiler(std::vector<std::string> arguments);
  ~Compiler();

  /// Compiles and runs one cell, whose lines count from 1. Throws CellError
  /// when the cell does not compile or link; whatever the cell throws passes.
  ///
  /// A copy of this process compiles the cell first, so a mistake in it, even
  /// one that crashes the compiler, leaves nothing behind.
  void run(const std::string& cell, const std::string& name);

  /// Throws CellError where there is no such folder.
  void add_include_path(const std::string& folder);

  /// Loads a shared library, whose symbols cells then see. Throws CellError.
  void load(const std::string& file);

  /// The names that continue the last word of `code`, in the scope or object
  /// that comes before it: shardbook::Ten, x.sha.
  std::vector<std::string> completions(std::string_view code);

  /// The declaration and the comment of the name that ends `code`, such as
  /// shardbook::Tensor; empty if there is none.
  std::string description(std::string_view code);

 private:
  std::string compile_only(const std::string& code);
  std::string describe(const std::string& name);
  std::string names_that_continue(const std::string& name);

  std::vector<std::string> arguments_;
  std::string diagnostics_;  ///< of what is being compiled
  bool in_copy_ = false;     ///< this is the child that compiles first
  std::unique_ptr<clang::Interpreter> clang_;
};

}  // namespace shardbook::notebook
