#pragma once

// The rows of chapters/rows.txt. Sources that include this have SHARDBOOK_ROOT.

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace shardbook {

struct DefaultRow {
  std::string title;  ///< of its group: "Proof"
  std::string chapter, label, options;
  bool is_in_overview = false;
};

inline std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

inline std::vector<DefaultRow> default_rows() {
  std::vector<DefaultRow> rows;
  std::ifstream file(SHARDBOOK_ROOT "/chapters/rows.txt");
  std::string title, shared;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      const std::size_t end = line.find(']');
      title = line.substr(1, end - 1);
      shared = line.substr(end + 1);
      continue;
    }
    std::istringstream cells(line);
    std::string chapter, label, more;
    std::getline(cells, chapter, '|');
    std::getline(cells, label, '|');
    std::getline(cells, more);
    label = trimmed(label);
    const bool has_star = label.rfind('*', 0) == 0;
    rows.push_back({title, trimmed(chapter), label.substr(has_star ? 1 : 0),
                    shared + " " + more, has_star});
  }
  return rows;
}

}  // namespace shardbook
