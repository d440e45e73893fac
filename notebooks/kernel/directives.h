#pragma once

// The #pragma cling lines of a cell, which clang does not know.

#include <string>
#include <string_view>
#include <vector>

namespace shardbook::notebook {

enum class DirectiveKind { kIncludePath, kLibraryPath, kLoad };

struct Directive {
  DirectiveKind kind = DirectiveKind::kLoad;
  std::string value = {};  ///< a path, or the name of a library
  int line = 0;
};

struct Directives {
  std::vector<Directive> list = {};
  std::string rest = {};   ///< the cell with these lines left empty
  std::string error = {};  ///< one sentence about the first unknown pragma
};

/// Reads add_include_path("..."), add_library_path("...") and load("...").
Directives directives_of(std::string_view cell);

/// The file that load("name") means: `name` itself, name.so, or either in one
/// of `folders`. Empty when there is none.
std::string find_library(const std::string& name,
                         const std::vector<std::string>& folders);

}  // namespace shardbook::notebook
