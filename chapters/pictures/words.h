#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

namespace shardbook::pictures {

/// The texts of figures in another language, by a table from English in which {}
/// stands for a number with its unit:
///
///   "at most {}": "最多 {}"
///   "{} of {} tokens": "{1} 个 token 中的 {0} 个"
///
/// While it lives, figures of this thread speak its language.
class Words {
 public:
  /// "words.LANGUAGE.json" has the table ("texts"), and the names that no language
  /// changes ("unchanged"). Throws shardbook::Error when it cannot be opened.
  explicit Words(const std::string& file);
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  /// Lines of the table that no figure has asked for.
  std::vector<std::string> unused() const;

 private:
  friend std::string said(const std::string& english);
  friend std::string language();
  /// Keeps what it has looked up: the same texts come again and again.
  const std::string& of(const std::string& english);
  std::string looked_up(const std::string& english);

  std::string file_;
  std::map<std::string, std::string> texts_, known_;
  std::set<std::string> unchanged_, used_;
};

/// The text as figures say it now: by the table, or else its sentences, or else its
/// parts between semicolons. Numbers, formulas, "quoted code" and names stay: words
/// with a digit, an underscore or no two small letters in a row, and those of the
/// list. Throws shardbook::Error when the table lacks a text.
std::string said(const std::string& english);
/// "zh-CN"; empty for English.
std::string language();

}  // namespace shardbook::pictures
