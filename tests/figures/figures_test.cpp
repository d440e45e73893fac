// The figures beside the pages are what the program draws, and each is on a page.

#include "chapters/figures/figures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/figures/pieces.h"
#include "chapters/pictures/figure.h"
#include "chapters/pictures/words.h"
#include "comm/algorithms/ring.h"
#include "tests/support/errors.h"

namespace shardbook::figures {
namespace {

namespace fs = std::filesystem;

using pictures::Words, pictures::said;

const fs::path kRoot = SHARDBOOK_ROOT;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> files_of_program() {
  std::vector<std::string> files;
  for (const PageFigure& figure : all_figures()) {
    files.push_back(figure.file);
  }
  const Words chinese(kRoot / kChinese);
  for (const PageFigure& figure : all_figures()) {
    files.push_back(file_name(figure));
  }
  return files;
}

// Files of the book with this ending, from its root; none of build folders.
std::vector<std::string> files_of_book(const std::string& ending) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(kRoot)) {
    if (entry.path().extension() == ending) {
      files.push_back(entry.path().filename().string());
    }
  }
  for (const char* room : {"bench", "chapters", "comm", "notebooks", "sim"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      if (entry.path().extension() == ending) {
        files.push_back(fs::relative(entry.path(), kRoot).string());
      }
    }
  }
  return files;
}

struct Image {
  std::string page, file, alt;
};

std::vector<Image> images_of_pages() {
  static const std::regex kImage(R"(!\[([^\]]*)\]\(([^)]+\.svg)\))");
  std::vector<Image> images;
  for (const std::string& page : files_of_book(".md")) {
    const std::string text = read(kRoot / page);
    for (std::sregex_iterator image(text.begin(), text.end(), kImage), end;
         image != end; ++image) {
      const fs::path file = fs::path(page).parent_path() / (*image)[2].str();
      images.push_back({page, file.lexically_normal().string(), (*image)[1]});
    }
  }
  return images;
}

class FigureFile : public testing::TestWithParam<PageFigure> {};

TEST_P(FigureFile, IsWhatTheProgramDraws) {
  EXPECT_EQ(read(kRoot / GetParam().file), svg_file(GetParam()))
      << "./shardbook figures " << GetParam().file << " draws it again";
}

INSTANTIATE_TEST_SUITE_P(All, FigureFile, testing::ValuesIn(all_figures()),
                         [](const auto& param) {
                           std::string name = param.param.file;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](unsigned char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

// Throws when the table lacks a text.
TEST(FigureFiles, AreWhatTheProgramDrawsInChinese) {
  const Words words(kRoot / kChinese);
  for (const PageFigure& figure : all_figures()) {
    EXPECT_NO_THROW(
        EXPECT_EQ(read(kRoot / file_name(figure)), svg_file(figure)))
        << figure.file;
  }
  EXPECT_EQ(words.unused(), std::vector<std::string>());
}

TEST(Words, SayTextsByTheirTable) {
  EXPECT_EQ(said("forward"), "forward");
  const Words words(kRoot / kChinese);
  for (const auto& [english, chinese] : std::map<std::string, std::string>{
           {"", ""},
           {"GPT-2, bf16: 1.5 ms", "GPT-2, bf16: 1.5 ms"},
           {"\"quoted words\": 2", "\"quoted words\": 2"},
           {"c_attn 1.77 M", "c_attn 1.77 M"},
           {"all-reduce, 6/4 n", "all-reduce, 6/4 n"},
           {"16 tokens on 4 ranks", "4 个 rank 上的 16 个 token"},
           {"exposed: 3.26 ms", "暴露：3.26 ms"},
           {"forward; 2 units. 8 devices.", "前向；2 个单位。8 个设备。"}}) {
    EXPECT_EQ(said(english), chinese);
  }
}

// Its numbers are places, with their units; in a name they are a part of it.
TEST(Words, NameTheTextThatTheyLack) {
  EXPECT_EQ(error_of([] { Words("words.xx.json"); }),
            "words.xx.json: cannot be opened");
  const Words words(kRoot / kChinese);
  expect_error([] { said("forward. 2.5 GiB of 12,288 sheep in 1F1B; busy"); },
               {"words.zh-CN.json has no line \"{} of {} sheep in 1F1B\""});
}

TEST(FigureFiles, InChineseSayTheirLanguage) {
  for (const std::string& file : files_of_program()) {
    const std::string svg = read(kRoot / file);
    const bool is_chinese = file.ends_with(".zh-CN.svg");
    EXPECT_EQ(svg.find("xml:lang=\"zh-CN\"") != std::string::npos, is_chinese)
        << file;
  }
}

TEST(Texts, OfChineseAreAsWideAsTheirLetters) {
  EXPECT_EQ(pictures::text_width("ab"), 2 * 6.6);
  EXPECT_EQ(pictures::text_width("µ−"), 2 * 6.6);
  EXPECT_EQ(pictures::text_width("前向，"), 6 * 6.6);
  const Words words(kRoot / kChinese);
  EXPECT_EQ(pictures::text_width("forward"), 4 * 6.6);
  // Two Chinese characters fit, and no line begins with a sign
  const std::string svg = pictures::Figure("forward; busy", 35).svg("");
  for (const char* line : {">前<", ">向；<", ">忙碌<"}) {
    EXPECT_NE(svg.find(line), std::string::npos) << svg;
  }
}

TEST(FigureFiles, AreThoseOfTheProgram) {
  std::vector<std::string> drawn = files_of_program();
  std::vector<std::string> there = files_of_book(".svg");
  std::sort(drawn.begin(), drawn.end());
  std::sort(there.begin(), there.end());
  EXPECT_EQ(there, drawn);
}

TEST(FigureFiles, EachIsOnAPage) {
  std::set<std::string> shown;
  for (const Image& image : images_of_pages()) shown.insert(image.file);
  for (const PageFigure& figure : all_figures()) {
    EXPECT_TRUE(shown.count(figure.file)) << figure.file << " is on no page";
  }
}

// The colours of light pages and of dark ones in report.css, by name.
std::set<std::pair<std::string, std::string>> colors_of_report() {
  const std::string css = read(kRoot / "chapters/table/report.css");
  static const std::regex kColor("--([a-z-]+): (#[0-9a-f]{6});");
  std::map<std::string, std::vector<std::string>> values;
  for (std::sregex_iterator color(css.begin(), css.end(), kColor), end;
       color != end; ++color) {
    values[(*color)[1]].push_back((*color)[2]);
  }
  std::set<std::pair<std::string, std::string>> pairs;
  for (const auto& [name, all] : values) {
    if (all.size() > 1) pairs.insert({all[0], all[1]});
  }
  return pairs;
}

TEST(FigureFiles, HaveTheColorsOfTheReport) {
  static const std::regex kRule(
      "\\[(?:fill|stroke)=\"(#[0-9a-f]{6})\"\\]\\{[a-z]+:(#[0-9a-f]{6})\\}");
  static const std::regex kUsed("(?:fill|stroke)=\"(#[0-9a-f]{6})\"");
  const auto colors = colors_of_report();
  for (const std::string& file : files_of_program()) {
    const std::string svg = read(kRoot / file);
    std::set<std::string> ruled;
    for (std::sregex_iterator rule(svg.begin(), svg.end(), kRule), end;
         rule != end; ++rule) {
      EXPECT_TRUE(colors.count({(*rule)[1], (*rule)[2]}))
          << file << ": " << (*rule)[0] << " is not in report.css";
      ruled.insert((*rule)[1]);
    }
    for (std::sregex_iterator used(svg.begin(), svg.end(), kUsed), end;
         used != end; ++used) {
      EXPECT_TRUE(ruled.count((*used)[1]))
          << file << ": " << (*used)[1] << " has no colour on dark pages";
    }
  }
}

// Texts have 12 pixels; a page is 860 wide.
TEST(FigureFiles, FitThePage) {
  static const std::regex kWidth("viewBox=\"[^ ]+ [^ ]+ ([0-9]+) ");
  for (const std::string& file : files_of_program()) {
    const std::string svg = read(kRoot / file);
    std::smatch width;
    ASSERT_TRUE(std::regex_search(svg, width, kWidth)) << file;
    EXPECT_LE(std::stoi(width[1]), 860) << file;
  }
}

// The frames of a ring send the bytes that its cost card counts.
TEST(Frames, OfARingSendItsBytes) {
  const auto frames = frames_of([](ProcessGroup& group, const Tensor& tensor) {
    algorithms::ring_all_reduce(group, tensor);
  });
  ASSERT_EQ(frames.size(), 7u);
  std::vector<double> sent(kPieceRanks);
  for (const Frame& frame : frames) {
    for (const Message& message : frame.messages) {
      sent[static_cast<std::size_t>(message.from)] +=
          static_cast<double>(message.count);
      EXPECT_EQ(message.to, (message.from + 1) % kPieceRanks);
    }
  }
  EXPECT_EQ(sent,
            algorithms::ring_all_reduce_cost(kPieceRanks, 4).elements_sent);
  // Sums of 2^(4 p + r) over all ranks r
  for (const Pieces& pieces : frames.back().ranks) {
    EXPECT_EQ(pieces, (Pieces{15, 15 * 16, 15 * 256, 15 * 4096}));
  }
}

// In a text for those who do not see it, eight words say what one sees.
TEST(PageImages, HaveTextsOfTheirOwn) {
  std::set<std::string> texts;
  for (const Image& image : images_of_pages()) {
    // Words without spaces, and the state of CI
    if (image.page.ends_with(".zh-CN.md")) continue;
    if (image.file.ends_with("/badge.svg")) continue;
    std::istringstream words(image.alt);
    const auto num_words =
        std::distance(std::istream_iterator<std::string>(words), {});
    EXPECT_GE(num_words, 8) << image.page << ": " << image.file;
    EXPECT_TRUE(texts.insert(image.alt).second)
        << image.page << ": another image has the text \"" << image.alt << '"';
  }
  EXPECT_GT(texts.size(), 4u);
}

}  // namespace
}  // namespace shardbook::figures
