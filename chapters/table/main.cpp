// The table of several program runs, side by side.
//
//   shardbook_table build/run/02_ddp-threads-2.json ...
//
// Exit status: 0 all claims hold, 1 a claim failed, 2 a file cannot be read.

#include <langinfo.h>

#include <clocale>
#include <fstream>
#include <iostream>
#include <iterator>

#include "chapters/table/table.h"
#include "core/check.h"

namespace {

using shardbook::table::Charset;

Charset terminal_charset() {
  std::setlocale(LC_CTYPE, "");
  const std::string codeset = nl_langinfo(CODESET);
  return codeset == "UTF-8" ? Charset::kUtf8 : Charset::kAscii;
}

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  SB_CHECK(file && !file.bad(), path, ": this file cannot be read");
  SB_CHECK(!text.empty(), path, ": this file is empty");
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    SB_CHECK(argc > 1, "give the JSON files of one or more runs");
    std::vector<shardbook::table::ProgramRun> runs;
    for (int i = 1; i < argc; ++i) {
      runs.push_back(shardbook::table::read_run(read_file(argv[i]), argv[i]));
    }
    std::cout << format_table(runs, terminal_charset()) << std::flush;
    SB_CHECK(std::cout, "the table cannot be written");
    return count_failures(runs) == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "shardbook_table: " << error.what() << "\n";
    return 2;
  }
}
