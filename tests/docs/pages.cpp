#include "tests/docs/pages.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <sstream>

namespace shardbook::docs {
namespace {

constexpr std::size_t kBlank = std::string::npos;

// The column of the first character, or kBlank.
std::size_t depth_of(const std::string& line) {
  return line.find_first_not_of(' ');
}

bool is_comment(const std::string& line) {
  const std::size_t depth = depth_of(line);
  return depth != kBlank && line.compare(depth, 2, "//") == 0;
}

// The words of a comment line, without slashes and spaces around them.
std::string comment_text(const std::string& line) {
  const std::size_t begin = line.find_first_not_of(" /");
  return begin == std::string::npos ? "" : line.substr(begin);
}

// Takes off trailing spaces, blank lines around, and common indentation.
Lines dedent(Lines lines) {
  std::size_t depth = kBlank;
  for (std::string& line : lines) {
    line.erase(line.find_last_not_of(" \r") + 1);
    depth = std::min(depth, depth_of(line));
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  while (!lines.empty() && lines.front().empty()) lines.erase(lines.begin());
  for (std::string& line : lines) {
    if (!line.empty()) line.erase(0, depth);
  }
  return lines;
}

// A fence of backticks: its length, or 0.
std::size_t fence_length(const std::string& line) {
  const std::size_t depth = depth_of(line);
  if (depth == kBlank) return 0;
  const std::size_t end = line.find_first_not_of('`', depth);
  const std::size_t length = std::min(end, line.size()) - depth;
  return length >= 3 ? length : 0;
}

constexpr auto kIgnored = [](int, const std::string&) {};

// Calls outside(number, line) for prose, opened(number, words) for the line that
// opens a fence, and inside(number, line) for code.
template <typename Outside, typename Opened = decltype(kIgnored),
          typename Inside = decltype(kIgnored)>
void walk(const std::string& page, Outside outside, Opened opened = kIgnored,
          Inside inside = kIgnored) {
  std::size_t fence = 0;
  int number = 0;
  for (const std::string& line : split_lines(page)) {
    ++number;
    const std::size_t length = fence_length(line);
    if (fence == 0 && length > 0) {
      fence = length;
      opened(number, line.substr(depth_of(line) + length));
    } else if (fence > 0 && length >= fence) {
      fence = 0;
    } else if (fence > 0) {
      inside(number, line);
    } else {
      outside(number, line);
    }
  }
}

// Whether the words of a comment are this step, numbered or not.
bool has_title(const std::string& words, const std::string& step) {
  std::size_t begin = 0;
  while (begin < words.size() && std::isdigit(words[begin])) ++begin;
  if (begin > 0 && words.compare(begin, 2, ". ") == 0) {
    begin += 2;
  } else {
    begin = 0;
  }
  if (words.compare(begin, step.size(), step) != 0) return false;
  const std::size_t end = begin + step.size();
  return end == words.size() ||
         std::string(".,:;(").find(words[end]) != kBlank ||
         words.compare(end, 2, " (") == 0;
}

struct Comment {
  std::size_t begin, end;  // lines
  std::string words;
};

// Comments that stand alone; lines that follow each other are one.
std::vector<Comment> find_comments(const Lines& lines) {
  std::vector<Comment> comments;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!is_comment(lines[i])) continue;
    Comment comment{i, i, ""};
    while (comment.end < lines.size() && is_comment(lines[comment.end])) {
      if (!comment.words.empty()) comment.words += ' ';
      comment.words += comment_text(lines[comment.end++]);
    }
    i = comment.end;
    comments.push_back(std::move(comment));
  }
  return comments;
}

// The one comment with this title; otherwise says in `problem` why not.
std::optional<Comment> only_comment(const Lines& lines, const std::string& step,
                                    std::string& problem) {
  std::vector<Comment> found;
  for (const Comment& comment : find_comments(lines)) {
    if (has_title(comment.words, step)) found.push_back(comment);
  }
  if (found.size() == 1) return found.front();
  problem = std::to_string(found.size()) + " comments have the title \"" +
            step + "\"; there has to be one";
  return std::nullopt;
}

// What a lesson has between its marks.
Lines strategy_of(const Lines& lines) {
  const auto begin =
      std::find(lines.begin(), lines.end(), "// --- the strategy");
  const auto end = std::find(begin, lines.end(), "// --- end");
  return begin == end ? Lines{} : Lines(begin + 1, end);
}

// The code from a comment to the end of the block around it.
Lines step_below(const Lines& lines, const Comment& comment) {
  const std::size_t depth = depth_of(lines[comment.begin]);
  Lines step;
  for (std::size_t i = comment.end; i < lines.size(); ++i) {
    const std::size_t here = depth_of(lines[i]);
    if (here != kBlank && here < depth) break;
    step.push_back(lines[i]);
  }
  return dedent(step);
}

}  // namespace

Lines split_lines(const std::string& text) {
  Lines lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(std::filesystem::path(SHARDBOOK_ROOT) / path,
                     std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_translation(const std::filesystem::path& page) {
  return page.string().ends_with(".zh-CN.md");
}

std::vector<std::string> chapter_names() {
  static const std::regex kName("[0-9][0-9]_.*");
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(SHARDBOOK_ROOT "/chapters")) {
    const std::string name = entry.path().filename().string();
    if (std::regex_match(name, kName)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<Excerpt> find_excerpts(const std::string& page) {
  static const std::regex kHeader(R"(^\s*\w+\s+([^\s#]+)#(.*?)\s*$)");
  std::vector<Excerpt> excerpts;
  bool quoting = false;
  walk(
      page, kIgnored,
      [&](int number, const std::string& words) {
        std::smatch match;
        quoting = std::regex_match(words, match, kHeader);
        if (quoting) excerpts.push_back({number, match[1], match[2], {}});
      },
      [&](int, const std::string& line) {
        if (quoting) excerpts.back().code.push_back(line);
      });
  return excerpts;
}

std::vector<Link> find_local_links(const std::string& page) {
  static const std::regex kInline(R"(\]\(\s*<?([^\s)>]+))");
  static const std::regex kReference(R"(^ {0,3}\[[^\]]+\]:\s+<?([^\s>]+))");
  static const std::regex kHtml(R"re((?:src|href)="([^"]+)")re");
  static const std::regex kCode("`[^`]*`");
  // ../../actions/ are GitHub's own pages, beside those of the tree
  static const std::regex kElsewhere(
      R"(^([a-zA-Z][a-zA-Z0-9+.-]*:|//|\.\./\.\./actions/))");
  std::vector<Link> links;
  walk(page, [&](int number, const std::string& line) {
    const std::string prose = std::regex_replace(line, kCode, "`");
    for (const std::regex* form : {&kInline, &kReference, &kHtml}) {
      for (std::sregex_iterator i(prose.begin(), prose.end(), *form), end;
           i != end; ++i) {
        const std::string target = (*i)[1];
        if (!std::regex_search(target, kElsewhere)) {
          links.push_back({number, target});
        }
      }
    }
  });
  return links;
}

std::vector<std::string> find_anchors(const std::string& page) {
  static const std::regex kHeading(R"(^#{1,6}\s+(.*?)\s*#*\s*$)");
  std::vector<std::string> anchors;
  walk(page, [&](int, const std::string& line) {
    std::smatch match;
    if (!std::regex_match(line, match, kHeading)) return;
    std::string anchor;
    for (const char c : match[1].str()) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0x80 || std::isalnum(byte) || c == '-' || c == '_') {
        anchor += static_cast<char>(std::tolower(byte));
      } else if (c == ' ') {
        anchor += '-';
      }
    }
    anchors.push_back(anchor);
  });
  return anchors;
}

std::string compare_excerpt(const Excerpt& excerpt, const std::string& source) {
  const Lines lines = split_lines(source);
  Lines code = dedent(excerpt.code), step = strategy_of(lines);
  if (excerpt.step != "the strategy") {
    std::string problem;
    const auto found = only_comment(lines, excerpt.step, problem);
    if (!found) return problem;
    const Comment& comment = *found;
    if (!code.empty() && is_comment(code.front()) &&
        has_title(comment_text(code.front()), excerpt.step)) {
      const Lines quoted(lines.begin() + comment.begin,
                         lines.begin() + comment.end);
      const Lines words = dedent(quoted);
      if (code.size() < words.size() ||
          !std::equal(words.begin(), words.end(), code.begin())) {
        return "the step comment itself differs";
      }
      code = dedent(Lines(code.begin() + words.size(), code.end()));
    }
    step = step_below(lines, comment);
  }
  if (code.empty()) return "the excerpt is empty";

  for (std::size_t i = 0; i < code.size(); ++i) {
    if (i == step.size()) return "the step has no line \"" + code[i] + "\"";
    if (code[i] != step[i]) {
      return "the page says \"" + code[i] + "\", the source says \"" + step[i] +
             "\"";
    }
  }
  if (code.size() == step.size()) return "";
  const std::string& next = step[code.size()];
  if (next.empty() || (depth_of(next) == 0 && is_comment(next))) return "";
  return "the excerpt stops before \"" + next + "\"";
}

}  // namespace shardbook::docs
