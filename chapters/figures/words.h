#pragma once

// The texts of figures in another language: a table from English, in which {}
// stands for a number with its unit.
//
//   "at most {}": "最多 {}"
//   "{} of {} tokens": "{1} 个 token 中的 {0} 个"

#include <map>
#include <set>
#include <string>
#include <vector>

namespace shardbook::figures {

class Words {
 public:
  /// NAME is `file`'s language in "words.NAME.json". The file has the names that
  /// are the same in all languages ("unchanged"), and the table ("texts").
  /// Throws shardbook::Error when it cannot be read.
  explicit Words(const std::string& file);

  const std::string& language() const { return language_; }
  /// The text by the table, or else its sentences, or else its parts between
  /// semicolons. A text without words is the same in all languages: numbers,
  /// formulas, "what is quoted", and names: those that have a digit, an underscore
  /// or no two small letters in a row, and those that the file lists.
  std::string of(const std::string& english);
  /// The parts that were asked for and are not in the table, since the last call.
  std::set<std::string> missing();
  /// Lines of the table that were not asked for.
  std::vector<std::string> unused() const;

 private:
  bool has_words(const std::string& text) const;

  std::string language_;
  std::set<std::string> unchanged_, used_, missing_;
  std::map<std::string, std::string> texts_;
};

}  // namespace shardbook::figures
