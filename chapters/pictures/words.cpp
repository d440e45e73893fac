#include "chapters/pictures/words.h"

#include <fmt/args.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "core/check.h"

namespace shardbook::pictures {
namespace {

thread_local Words* spoken = nullptr;

using Numbers = fmt::dynamic_format_arg_store<fmt::format_context>;

// The text with places for its numbers, which are added to `numbers`. A number in
// a name (GPT-2, 1F1B) is a part of the name.
std::string pattern_of(const std::string& text, Numbers& numbers) {
  static const std::regex kPart(
      "(\\d[\\d.,]*\\d|\\d)(?![\\w.-]*[A-Za-z])"
      "( (?:%|[KMG]i?B?|B|(?:m|µ)?s)(?!\\w))?|[\\w.-]+|[^]");
  std::string pattern;
  for (std::sregex_iterator part(text.begin(), text.end(), kPart), end;
       part != end; ++part) {
    const bool is_number = (*part)[1].matched;
    pattern += is_number ? "{}" : part->str();
    if (is_number) numbers.push_back(part->str());
  }
  return pattern;
}

bool has_words(const std::string& pattern, const std::set<std::string>& names) {
  static const std::regex kName("\"[^\"]*\"|[\\w-]+"),
      kWord("[A-Za-z-]*[a-z]{2}[A-Za-z-]*");
  const std::sregex_iterator begin(pattern.begin(), pattern.end(), kName), end;
  return std::any_of(begin, end, [&](const std::smatch& name) {
    return std::regex_match(name.str(), kWord) && names.count(name.str()) == 0;
  });
}

}  // namespace

Words::Words(const std::string& file) : file_(file) {
  std::ifstream in(file);
  SB_CHECK(in, file, ": cannot be opened");
  const auto json = nlohmann::json::parse(in);
  texts_ = json.at("texts").get<std::map<std::string, std::string>>();
  unchanged_ = json.at("unchanged").get<std::set<std::string>>();
  spoken = this;
}

Words::~Words() { spoken = nullptr; }

std::vector<std::string> Words::unused() const {
  std::vector<std::string> lines;
  for (const auto& [english, text] : texts_) {
    if (used_.count(english) == 0) lines.push_back(english);
  }
  return lines;
}

const std::string& Words::of(const std::string& english) {
  const auto found = known_.find(english);
  if (found != known_.end()) return found->second;
  return known_[english] = looked_up(english);
}

std::string Words::looked_up(const std::string& english) {
  Numbers numbers;
  const std::string pattern = pattern_of(english, numbers);
  for (const std::string& line : {english, pattern}) {
    const auto found = texts_.find(line);
    if (found == texts_.end()) continue;
    used_.insert(line);
    return fmt::vformat(found->second, numbers);
  }
  if (!has_words(pattern, unchanged_)) return english;
  std::size_t at = english.find(". ");
  if (at == std::string::npos && english.back() == '.') at = english.size() - 1;
  const char* sign = at == std::string::npos ? "；" : "。";
  if (at == std::string::npos) at = english.find("; ");
  SB_CHECK(at != std::string::npos, file_, " has no line \"", pattern, '"');
  return of(english.substr(0, at)) + sign +
         of(english.substr(std::min(at + 2, english.size())));
}

std::string said(const std::string& english) {
  return spoken == nullptr ? english : spoken->of(english);
}

std::string language() {
  if (spoken == nullptr) return "";
  const std::filesystem::path file = spoken->file_;
  return file.stem().extension().string().substr(1);
}

}  // namespace shardbook::pictures
