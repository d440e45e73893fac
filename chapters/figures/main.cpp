// Writes the figures of the pages again, in English and in Chinese.
//
//   ./shardbook figures               all
//   ./shardbook figures 02_ddp        those whose file's name contains a word

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/words.h"
#include "core/check.h"
#include "core/text_file.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    SB_CHECK(argc > 1,
             "shardbook_figures: give the folder of the book, and "
             "words of files' names: . 02_ddp");
    const std::filesystem::path root = argv[1];
    const std::vector<std::string> words(argv + 2, argv + argc);
    std::vector<figures::PageFigure> chosen = figures::all_figures();
    std::erase_if(chosen, [&](const figures::PageFigure& figure) {
      const auto is_part = [&](const std::string& word) {
        return figure.file.find(word) != std::string::npos;
      };
      return !words.empty() && std::ranges::none_of(words, is_part);
    });
    SB_CHECK(!chosen.empty(), "figures ", words.empty() ? "" : words.front(),
             ": no figure's file has such a name; ./shardbook figures writes "
             "all, and lists them");
    const auto write = [&] {
      for (const figures::PageFigure& figure : chosen) {
        const std::string file = figures::file_name(figure);
        const std::filesystem::path path = root / file;
        write_text_file(path, figures::svg_file(figure),
                        path.string() + ": this file");
        fmt::print("{}\n", file);
      }
    };
    write();
    const pictures::Words chinese(root / figures::kChinese);
    write();
    return 0;
  });
}
