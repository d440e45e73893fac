// The tables of program runs, and their report.
//
//   shardbook_table build/runs/last
//   shardbook_table --html build/report.html --book .. build/runs/last
//   shardbook_table --html report.html build/runs/a build/runs/b
//
// Several folders are compared. A JSON file is a run of its own. With --overview,
// the tables fit one screen; with --quiet, only failed claims are printed. --book
// is the book's folder and --explorer the explorer's, as the page links to them.
//
// Exit status: 0 all claims hold, 1 a claim failed, 2 a file cannot be read or
// written.

#include <algorithm>
#include <csignal>
#include <iostream>
#include <iterator>

#include "chapters/table/run.h"
#include "chapters/table/table.h"
#include "core/check.h"
#include "core/text_file.h"
#include "sim/timeline_text.h"

namespace {

using namespace shardbook::table;

struct Arguments {
  std::string html_file;  // empty: no report
  ReportLinks links;
  bool overview = false, quiet = false;
  std::vector<std::string> paths;
};

Arguments read_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--html") {
      SB_CHECK(i + 1 < argc, "--html needs the name of a file to write");
      arguments.html_file = argv[++i];
    } else if (word == "--book" || word == "--explorer") {
      SB_CHECK(i + 1 < argc, word, " needs the name of a folder");
      (word == "--book" ? arguments.links.book : arguments.links.explorer) =
          argv[++i];
    } else if (word == "--overview") {
      arguments.overview = true;
    } else if (word == "--quiet") {
      arguments.quiet = true;
    } else {
      SB_CHECK(
          word.compare(0, 2, "--") != 0, word,
          ": unknown option; there are --html FILE, --book FOLDER, --explorer "
          "FOLDER, --overview and --quiet");
      arguments.paths.push_back(word);
    }
  }
  SB_CHECK(!arguments.paths.empty(),
           "give folders of runs, or the JSON files of runs");
  return arguments;
}

// The text for a terminal.
std::string text_of(const Runs& runs, const Arguments& arguments) {
  const shardbook::sim::TextStyle style = shardbook::sim::terminal_style();
  const Marks marks = marks_of(style.utf8, style.color);
  if (arguments.paths.size() > 1) {
    return format_comparison(runs) + "\n" + format_claims(runs, marks);
  }
  if (are_compared(runs)) return format_compared(runs, marks);
  return arguments.overview ? format_overview(runs, marks)
                            : format_table(runs, marks);
}

}  // namespace

int main(int argc, char** argv) {
  // A write beyond the limit on sizes of files fails, as on a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    const Arguments arguments = read_arguments(argc, argv);
    Runs runs;
    std::string remarks;
    for (const std::string& path : arguments.paths) {
      RunSet set = read_run_set(path);
      std::ranges::move(set.runs, std::back_inserter(runs));
      if (set.remark.empty()) continue;
      // Where there are several folders, each remark names its own
      const bool several = arguments.paths.size() > 1;
      remarks += (several ? set.name + ": " : "") + set.remark + "\n";
    }
    const bool failed = count_claims(runs).failed > 0;
    if (!arguments.quiet || failed) {
      std::cout << text_of(runs, arguments) << remarks << std::flush;
      SB_CHECK(std::cout, "the table cannot be written");
    }
    if (!arguments.html_file.empty()) {
      shardbook::write_text_file(arguments.html_file,
                                 report_html(runs, remarks, arguments.links),
                                 arguments.html_file + ": this file");
    }
    return failed ? 1 : 0;
  } catch (const std::exception& error) {
    std::cerr << "shardbook_table: " << error.what() << "\n";
    return 2;
  }
}
