// The table of several program runs, side by side, and their report.
//
//   shardbook_table build/run/02_ddp-threads-2.json ...
//   shardbook_table --html build/report.html build/run/*.json
//
// Exit status: 0 all claims hold, 1 a claim failed, 2 a file cannot be read or
// written.

#include <langinfo.h>

#include <clocale>
#include <fstream>
#include <iostream>
#include <iterator>

#include "chapters/table/html.h"
#include "chapters/table/table.h"
#include "core/check.h"

namespace {

using shardbook::table::Charset;
using shardbook::table::ProgramRun;

struct Arguments {
  std::string html_file;  // empty: no report
  std::vector<std::string> files;
};

Arguments read_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--html") {
      SB_CHECK(i + 1 < argc, "--html needs the name of a file to write");
      arguments.html_file = argv[++i];
    } else {
      SB_CHECK(word.compare(0, 2, "--") != 0, word,
               ": unknown option; there is --html FILE");
      arguments.files.push_back(word);
    }
  }
  SB_CHECK(!arguments.files.empty(), "give the JSON files of one or more runs");
  return arguments;
}

Charset terminal_charset() {
  std::setlocale(LC_CTYPE, "");
  const std::string codeset = nl_langinfo(CODESET);
  return codeset == "UTF-8" ? Charset::kUtf8 : Charset::kAscii;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  SB_CHECK(file && !file.bad(), path, ": this file cannot be read");
  SB_CHECK(!text.empty(), path, ": this file is empty");
  return text;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  SB_CHECK(file, path, ": this file cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = read_arguments(argc, argv);
    std::vector<ProgramRun> runs;
    for (const std::string& path : arguments.files) {
      runs.push_back(shardbook::table::read_run(read_file(path), path));
    }
    std::cout << format_table(runs, terminal_charset()) << std::flush;
    SB_CHECK(std::cout, "the table cannot be written");
    if (!arguments.html_file.empty()) {
      write_file(arguments.html_file, report_html(runs));
    }
    return count_claims(runs).failed == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "shardbook_table: " << error.what() << "\n";
    return 2;
  }
}
