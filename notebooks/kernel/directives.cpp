#include "notebooks/kernel/directives.h"

#include <filesystem>
#include <regex>

#include "notebooks/kernel/tokens.h"

namespace shardbook::notebook {

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
    const DirectiveKind kind = parts[1] == "load" ? DirectiveKind::kLoad
                               : parts[1] == "add_include_path"
                                   ? DirectiveKind::kIncludePath
                                   : DirectiveKind::kLibraryPath;
    found.list.push_back({kind, parts[2], token.line});
    const std::size_t begin = token.text.data() - cell.data();
    for (std::size_t i = begin; i < begin + token.text.size(); ++i) {
      if (found.rest[i] != '\n') found.rest[i] = ' ';
    }
  }
  return found;
}

std::string find_library(const std::string& name,
                         const std::vector<std::string>& folders) {
  namespace fs = std::filesystem;
  std::vector<std::string> candidates = {name, name + ".so"};
  for (const std::string& folder : folders) {
    candidates.push_back(folder + "/" + name);
    candidates.push_back(folder + "/" + name + ".so");
  }
  for (const std::string& candidate : candidates) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored)) {
      return fs::absolute(candidate).string();
    }
  }
  return {};
}

}  // namespace shardbook::notebook
