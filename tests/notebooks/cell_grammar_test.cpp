// What a cell may contain (notebooks/kernel/cell_grammar.h), and that all cells
// of the book's notebooks keep to it.

#include "notebooks/kernel/cell_grammar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace shardbook::notebook {
namespace {

namespace fs = std::filesystem;

void expect_kind(CellKind kind, const std::string& cell) {
  const CellOutline outline = outline_of(cell);
  EXPECT_EQ(outline.kind, kind) << cell << "\n" << outline.reason;
}

void expect_refused(const std::string& cell, int line,
                    const std::string& words) {
  const CellOutline outline = outline_of(cell);
  EXPECT_EQ(outline.kind, CellKind::kRefused) << cell;
  EXPECT_EQ(outline.line, line) << cell;
  EXPECT_NE(outline.reason.find(words), std::string::npos) << cell << "\n"
                                                           << outline.reason;
}

TEST(CellGrammar, DirectivesStandAlone) {
  expect_kind(CellKind::kDirectives,
              "#pragma cling load(\"a\")\n// why\n#include <vector>\n");
  expect_kind(CellKind::kEmpty, "// a comment\n/* and\nanother */\n");
  expect_refused("#include <vector>\nint a = 1;", 2, "nothing else");
  expect_refused("int a = 1;\n#include <vector>", 2, "cell of their own");
  expect_refused("#define A 1", 1, "#define");
}

TEST(CellGrammar, NamespacesHoldWhatStatementsMayNot) {
  expect_kind(CellKind::kNamespaces,
              "namespace a { int f() { for (;;) {} } }\n"
              "namespace a::b { struct S { int x; }; }\n"
              "inline namespace c { auto l = [] { return '}'; }; }");
  expect_refused("namespace a {}\nint b = 1;", 2, "namespace blocks only");
  expect_refused("int b = 1;\nnamespace a { int c; }", 2, "cell of its own");
}

TEST(CellGrammar, StatementsAreDeclarationsAndExpressions) {
  for (const char* cell :
       {"int a = 1; std::vector<int> v{1, 2};", "v[a[0]] = 1;",
        "std::cout << f(Options{3}) << \"; {\" << ';';",
        "using namespace std;\nint c = 2;", "namespace fs = std::filesystem;",
        "auto [x, y] = pair();", "Options options = {.a = 1};",
        "p->set({1, 2});", "int b[2] = {1, 2};", "delete[] p;",
        "const char* t = R\"x(for (;;) { ] )\")x\";",
        "[[maybe_unused]] int d = 0;",
        "auto e = make()->get<int>(Shape{2});"}) {
    expect_kind(CellKind::kStatements, cell);
  }
}

TEST(CellGrammar, EverythingElseIsRefusedWithItsLine) {
  expect_refused("int a = 1;\nfor (;;) {}", 2, "\"for\"");
  expect_refused("{ int a; }", 1, "a block");
  expect_refused("int f() { return 1; }", 1, "functions are defined");
  expect_refused("int f() const noexcept { return 1; }", 1, "functions are");
  expect_refused("auto f() -> std::vector<int> { return {}; }", 1,
                 "functions are defined");
  expect_refused("struct S { int a; };", 1, "\"struct\"");
  expect_refused("template <class T> T f();", 1, "\"template\"");
  expect_refused("\nauto f = [](int a) { return a; };", 2, "a lambda");
  expect_refused("run(4, [&] { return 1; });", 1, "a lambda");
  expect_refused("int a = 1;\na", 2, "no semicolon");
  expect_refused("int a = 1; using namespace std;", 1, "come first");
  expect_refused("namespace a = b;\nusing a::c;\nusing a::d;", 3,
                 "one \"using\" declaration at most");
  expect_refused("auto f = std::async(g);", 1, "std::async");
  expect_refused("namespace a { thread_local int b; }", 1, "thread_local");
  expect_refused("%timeit f();", 1, "magic");
  expect_refused("f(1));", 1, "closes nothing");
}

TEST(CellGrammar, UnfinishedCellsAreToldApart) {
  EXPECT_EQ(completeness_of("int a = 1;"), "complete");
  EXPECT_EQ(completeness_of("namespace a {"), "incomplete");
  EXPECT_EQ(completeness_of("f(\"text"), "incomplete");
  EXPECT_EQ(completeness_of("/* text"), "incomplete");
  EXPECT_EQ(completeness_of("R\"(text"), "incomplete");
  EXPECT_EQ(completeness_of("while (true) {}"), "invalid");
}

// A cell is what a reader typed, so any text must be read to its end.
TEST(CellGrammar, AnyTextIsRead) {
  const std::string text =
      "#pragma x\nnamespace a { auto b = [](){}; } R\"(\" '\\ 1e+ :: [[ \"";
  for (std::size_t begin = 0; begin < text.size(); ++begin) {
    for (std::size_t size = 0; begin + size <= text.size(); ++size) {
      const std::string part = text.substr(begin, size);
      for (const Token& token : tokens_of(part).list) {
        EXPECT_FALSE(token.text.empty()) << part;
      }
      completeness_of(part);
    }
  }
}

TEST(CellDirectives, PragmasOfClingAreTakenOut) {
  const Directives found = directives_of(
      "#pragma cling add_include_path(\"..\")\n"
      "#include <vector>\n"
      "#  pragma cling load( \"lib\" )  // why\n"
      "#pragma cling add_library_path(\"b\")");
  EXPECT_EQ(found.error, "");
  ASSERT_EQ(found.list.size(), 3);
  EXPECT_EQ(found.list[0].verb, "add_include_path");
  EXPECT_EQ(found.list[0].value, "..");
  EXPECT_EQ(found.list[1].verb, "load");
  EXPECT_EQ(found.list[1].value, "lib");
  EXPECT_EQ(found.list[2].verb, "add_library_path");
  // Lines keep their numbers.
  EXPECT_EQ(std::count(found.rest.begin(), found.rest.end(), '\n'), 3);
  EXPECT_EQ(found.rest.find("pragma"), std::string::npos);
  EXPECT_NE(found.rest.find("\n#include <vector>\n"), std::string::npos);
}

TEST(CellDirectives, OtherPragmasAreRefused) {
  EXPECT_NE(directives_of("#pragma once").error, "");
  EXPECT_NE(directives_of("#pragma cling unload(\"a\")").error, "");
  EXPECT_NE(directives_of("#pragma cling load(a)").error, "");
}

TEST(CellDirectives, LibrariesAreFoundWithAndWithoutTheirEnding) {
  const TempFolder folder;
  const std::string path = folder.path();
  std::ofstream(path + "/liba.so") << "x";
  EXPECT_EQ(find_library("liba", {"/nowhere", path}), path + "/liba.so");
  EXPECT_EQ(find_library("liba.so", {path}), path + "/liba.so");
  EXPECT_EQ(find_library(path + "/liba", {}), path + "/liba.so");
  EXPECT_EQ(find_library("libb", {path}), "");
}

// ---- The notebooks themselves

struct Cell {
  std::string where;
  nlohmann::json data;
};

std::vector<Cell> cells_of_notebooks() {
  std::vector<Cell> cells;
  for (const auto& entry :
       fs::directory_iterator(std::string(SHARDBOOK_ROOT) + "/notebooks")) {
    if (entry.path().extension() != ".ipynb") continue;
    std::ifstream file(entry.path());
    const nlohmann::json notebook = nlohmann::json::parse(file);
    int number = 0;
    for (const nlohmann::json& cell : notebook.at("cells")) {
      cells.push_back({entry.path().filename().string() + ", cell " +
                           std::to_string(++number),
                       cell});
    }
  }
  return cells;
}

std::string source_of(const nlohmann::json& cell) {
  const nlohmann::json& source = cell.at("source");
  if (source.is_string()) return source;
  std::string text;
  for (const std::string line : source) text += line;
  return text;
}

TEST(Notebooks, CellsKeepToTheGrammar) {
  const std::vector<Cell> cells = cells_of_notebooks();
  EXPECT_FALSE(cells.empty());
  for (const auto& [where, cell] : cells) {
    if (cell.at("cell_type") != "code") continue;
    const std::string source = source_of(cell);
    const CellOutline outline = outline_of(source);
    EXPECT_NE(outline.kind, CellKind::kRefused)
        << where << ", line " << outline.line << ": " << outline.reason;
    EXPECT_EQ(directives_of(source).error, "") << where;
  }
}

TEST(Notebooks, FilesHoldNothingThatChangesByItself) {
  std::set<std::string> ids;
  for (const auto& [where, cell] : cells_of_notebooks()) {
    EXPECT_TRUE(cell.contains("id")) << where;
    const std::string id =
        where.substr(0, where.find(',')) + cell.value("id", "");
    EXPECT_TRUE(ids.insert(id).second) << where << ": two cells have one id";
    EXPECT_FALSE(cell.at("metadata").contains("execution")) << where;
    if (cell.at("cell_type") != "code") continue;
    for (const nlohmann::json& output : cell.at("outputs")) {
      const nlohmann::json tags =
          cell.at("metadata").value("tags", nlohmann::json::array());
      const bool may_fail =
          std::find(tags.begin(), tags.end(), "raises-exception") != tags.end();
      EXPECT_TRUE(may_fail || output.at("output_type") != "error") << where;
    }
  }
}

}  // namespace
}  // namespace shardbook::notebook
