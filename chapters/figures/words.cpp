#include "chapters/figures/words.h"

#include <fmt/args.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <utility>

#include "core/check.h"

namespace shardbook::figures {
namespace {

// A text whose numbers are places, and the numbers with their units. A number in
// a name (GPT-2, 1F1B) is a part of the name.
struct Pattern {
  std::string key;
  fmt::dynamic_format_arg_store<fmt::format_context> numbers;
};

Pattern pattern_of(const std::string& text) {
  static const std::regex kPart(
      "(\\d[\\d.,]*\\d|\\d)(?![\\w.-]*[A-Za-z])"
      "( (?:%|[KMG]i?B?|B|(?:m|µ)?s)(?!\\w))?|[\\w.-]+");
  Pattern pattern;
  std::size_t end = 0;
  for (std::sregex_iterator part(text.begin(), text.end(), kPart), none;
       part != none; ++part) {
    const auto begin = static_cast<std::size_t>(part->position());
    pattern.key += text.substr(end, begin - end);
    const bool is_number = (*part)[1].matched;
    pattern.key += is_number ? "{}" : part->str();
    if (is_number) pattern.numbers.push_back(part->str());
    end = begin + part->str().size();
  }
  pattern.key += text.substr(end);
  return pattern;
}

}  // namespace

Words::Words(const std::string& file) {
  std::ifstream in(file);
  SB_CHECK(in, file, ": cannot be opened");
  const auto json = nlohmann::json::parse(in, nullptr, false);
  SB_CHECK(json.contains("texts") && json.contains("unchanged"), file,
           ": JSON with \"texts\" and \"unchanged\" is expected");
  language_ = std::filesystem::path(file).stem().extension().string().substr(1);
  texts_ = json["texts"].get<std::map<std::string, std::string>>();
  unchanged_ = json["unchanged"].get<std::set<std::string>>();
}

bool Words::has_words(const std::string& text) const {
  static const std::regex kQuoted("\"[^\"]*\""), kName("[\\w-]+"),
      kSmall("[a-z]{2}"), kMark("[\\d_]");
  const std::string key = std::regex_replace(pattern_of(text).key, kQuoted, "");
  const std::sregex_iterator begin(key.begin(), key.end(), kName), end;
  return std::any_of(begin, end, [&](const std::smatch& name) {
    const std::string word = name.str();
    return std::regex_search(word, kSmall) && !std::regex_search(word, kMark) &&
           unchanged_.count(word) == 0;
  });
}

std::string Words::of(const std::string& english) {
  const Pattern pattern = pattern_of(english);
  for (const std::string& key : {english, pattern.key}) {
    const auto found = texts_.find(key);
    if (found == texts_.end()) continue;
    used_.insert(key);
    return fmt::vformat(found->second, pattern.numbers);
  }
  if (!has_words(english)) return english;
  std::size_t at = english.find(". ");
  if (at == std::string::npos && english.back() == '.') at = english.size() - 1;
  const bool is_sentence = at != std::string::npos;
  if (!is_sentence) at = english.find("; ");
  if (at == std::string::npos) {
    missing_.insert(pattern.key);
    return english;
  }
  return of(english.substr(0, at)) + (is_sentence ? "。" : "；") +
         of(english.substr(std::min(at + 2, english.size())));
}

std::set<std::string> Words::missing() { return std::exchange(missing_, {}); }

std::vector<std::string> Words::unused() const {
  std::vector<std::string> keys;
  for (const auto& [key, text] : texts_) {
    if (used_.count(key) == 0) keys.push_back(key);
  }
  return keys;
}

}  // namespace shardbook::figures
