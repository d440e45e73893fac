// No key is ignored silently, and a damaged file causes an error at most.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "tests/chapters/15_engine/wild_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::engine {
namespace {

using Json = nlohmann::ordered_json;
using Path = Json::json_pointer;

/// Whether the text has the path, not as part of a name or (outside) a path.
bool has_path(const std::string& text, const std::string& path, bool inside) {
  for (std::size_t at = text.find(path); at != std::string::npos;
       at = text.find(path, at + 1)) {
    const char next =
        at + path.size() < text.size() ? text[at + path.size()] : ' ';
    const bool is_longer =
        std::isalnum(static_cast<unsigned char>(next)) != 0 || next == '_' ||
        (next == '/' && !inside);
    if (!is_longer) return true;
  }
  return false;
}

/// Whether the text names the key, a part of it, or its section.
bool names(const std::string& text, Path path) {
  if (has_path(text, path.to_string(), /*inside=*/true)) return true;
  for (path.pop_back(); !path.empty(); path.pop_back()) {
    if (has_path(text, path.to_string(), /*inside=*/false)) return true;
  }
  return false;
}

// --- Every key of the table --------------------------------------------------

/// 8 ranks satisfy all degrees in the files below.
constexpr int kRanks = 8;

/// Files into which keys are planted. Each has values that some keys need.
const std::vector<std::string>& bases() {
  static const std::vector<std::string> all = {
      R"({"train_batch_size": 8})",
      R"({"fp16": {"enabled": true}, "zero_optimization": {"stage": 2,
          "offload_optimizer": {"device": "cpu"}}})",
      R"({"zero_optimization": {"stage": 2}})",
      R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device":
          "cpu"}}, "shardbook": {}})",
      R"({"zero_optimization": true})",
      R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}})",
      R"({"optimizer": {"type": "Adam", "params": {}}, "scheduler": {"type": "WarmupDecayLR",
          "params": {"warmup_max_lr": 9, "warmup_num_steps": 2,
            "total_num_steps": 2000}}})",
      R"({"shardbook": {"experts": {"num_experts": [4]}, "tensor_parallel":
          {"size": 8, "mode": "2.5d"}}})",
      R"({"shardbook": {"context_parallel": {"size": 2}}})",
      R"({"scheduler": {"params": {}}})",
  };
  return all;
}

/// For each key, one of them at least is legal and not the default.
const Json& values() {
  static const Json all = Json::parse(R"([true, 3, "cpu", "auto", {}, null,
      false, 0.25, 2, "none", "fp16", "linear", "parameters", "gpipe", "2d",
      "ulysses", "zigzag", "blocks", "fsdp", "AdamW", "WarmupLR", [0.5, 0.6],
      [2], {"enabled": true}, {"type": "WarmupLR", "params": {}},
      {"type": "SGD"}])");
  return all;
}
constexpr std::size_t kEveryKind = 6;  // the first ones: one of each type

/// An error; a remark; another config; none of these.
enum class Fate { kRefused, kRemarked, kRead, kSilent };

/// The result of `value` at `path` of the base, which gives `without` alone.
Fate fate_of(const Json& base, const Outcome& without, const Path& path,
             const Json& value) {
  Json json = base;
  const std::vector<Path> sections = {path.parent_pointer(),
                                      path.parent_pointer().parent_pointer()};
  for (const Path& section : sections) {
    // The base has the section in its old form
    if (json.contains(section) && !json[section].is_object()) {
      return Fate::kRefused;
    }
  }
  json[path] = value;
  const Outcome outcome = outcome_of(json.dump(), kRanks);
  if (!outcome.error.empty()) return Fate::kRefused;
  if (names(outcome.remarks, path)) return Fate::kRemarked;
  return outcome.json != without.json ? Fate::kRead : Fate::kSilent;
}

bool is_section(const std::string& path) {
  const auto& rows = internal::known_keys();
  return std::any_of(rows.begin(), rows.end(),
                     [&](const auto& row) { return row.section == path; });
}

/// Indices of the bases, the ones with the key's outermost section first.
std::vector<std::size_t> bases_for(Path path) {
  while (!path.parent_pointer().empty()) path.pop_back();
  std::vector<std::size_t> some, others;
  for (std::size_t i = 0; i < bases().size(); ++i) {
    (Json::parse(bases()[i]).contains(path) ? some : others).push_back(i);
  }
  some.insert(some.end(), others.begin(), others.end());
  return some;
}

// Fails if the reader does not copy a value it has read, and if the table says
// that a key acts but nothing reads it.
TEST(EngineConfigFuzz, EveryKnownKeyActsOrIsNamed) {
  if (kSanitized) GTEST_SKIP() << "the mutations below run the same code";
  std::vector<Outcome> read;
  for (const std::string& base : bases()) {
    read.push_back(outcome_of(base, kRanks));
  }
  for (const internal::KnownKeys& row : internal::known_keys()) {
    const bool acts = row.effect == internal::Effect::kActs;
    for (const internal::KnownKey& key : internal::keys_of(row)) {
      const Path path(std::string(row.section) + "/" + key.name);
      SCOPED_TRACE(path.to_string());
      bool was_read = false, was_remarked = false;
      for (const std::size_t i : bases_for(path)) {
        const Json base = Json::parse(bases()[i]);
        // One of several values may equal the base's value without the key
        std::vector<Json> silent;
        for (std::size_t k = 0; k < values().size(); ++k) {
          if (k >= kEveryKind && (was_read || !acts)) break;
          const Fate fate = fate_of(base, read[i], path, values()[k]);
          was_read = was_read || fate == Fate::kRead;
          was_remarked = was_remarked || fate == Fate::kRemarked;
          if (fate == Fate::kSilent && !values()[k].is_object()) {
            silent.push_back(values()[k]);
          }
        }
        EXPECT_LE(silent.size(), 1U)
            << testing::PrintToString(silent) << " in " << base;
        if (was_read || !acts) break;
      }
      EXPECT_TRUE(!acts || was_read || was_remarked ||
                  is_section(path.to_string()));
    }
  }
}

// --- Mutations ---------------------------------------------------------------

std::vector<std::string> wild_names() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(wild_folder())) {
    all.push_back(entry.path().stem().string());
  }
  std::sort(all.begin(), all.end());  // a folder's order is arbitrary
  return all;
}

class Mutator {
 public:
  explicit Mutator(std::uint32_t seed) : random_(seed) {}

  std::size_t below(std::size_t limit) { return random_() % limit; }

  /// The path of a value or of a section in the file.
  Path any_path(const Json& json) {
    Path path;
    const Json* at = &json;
    do {
      auto item = at->items().begin();
      for (std::size_t i = below(at->size()); i > 0; --i) ++item;
      path.push_back(item.key());
      at = &item.value();
    } while (at->is_object() && !at->empty() && below(3) > 0);
    return path;
  }
  /// The key with one letter changed, added or left out.
  std::string misspelt(std::string key) {
    const std::size_t at = below(key.size());
    const char letter = static_cast<char>('a' + below(26));
    const std::size_t setup = below(3);
    if (setup == 0) key[at] = key[at] == letter ? 'Z' : letter;
    if (setup == 1) key.insert(at, 1, letter);
    if (setup == 2) key.erase(at, 1);
    return key;
  }
  /// The text with a few characters replaced, moved or left out.
  std::string noise(std::string text) {
    static const std::string kLetters = "{}[]:,\"\\0-e.#/*\n \x01\xff";
    for (std::size_t i = 0; i <= below(4) && !text.empty(); ++i) {
      const std::size_t at = below(text.size());
      switch (below(3)) {
        case 0:
          text[at] = kLetters[below(kLetters.size())];
          break;
        case 1:
          text.erase(at, 1 + below(10));
          break;
        default:
          const std::size_t from = below(text.size());
          text.insert(at, text.substr(from, below(20)));
      }
    }
    return text;
  }

 private:
  std::mt19937 random_;  // the same numbers everywhere
};

Json& parent_of(Json& json, const Path& path) {
  return json[path.parent_pointer()];
}

/// Renames the key at the path, keeping its value.
Json renamed(const Json& json, const Path& path, const std::string& name) {
  Json result = json;
  Json& parent = parent_of(result, path);
  Json copy = Json::object();
  for (const auto& [key, value] : parent.items()) {
    copy[key == path.back() ? name : key] = value;
  }
  parent = std::move(copy);
  return result;
}

class EngineConfigMutations : public testing::Test {
 protected:
  /// Applies `mutate` to random planted files, many times.
  template <typename Mutate>
  void on_many(int count, Mutate mutate) {
    const std::vector<std::string> names = wild_names();
    std::map<std::string, Json> files;
    for (const std::string& name : names) {
      const Json json =
          Json::parse(wild_text(name), nullptr, /*allow_exceptions=*/false);
      if (json.is_object()) files[name] = json;  // no comments, no templates
    }
    ASSERT_GT(files.size(), 40U);
    Mutator mutator(/*seed=*/15);
    for (int i = 0; i < (kSanitized ? count / 10 : count); ++i) {
      auto file = files.begin();
      std::advance(file, mutator.below(files.size()));
      SCOPED_TRACE(file->first);
      mutate(mutator, file->second);
    }
  }
};

// Would fail if the nearest name were used silently or an unknown key ignored.
TEST_F(EngineConfigMutations, AMisspeltKeyIsNamed) {
  on_many(700, [](Mutator& mutator, const Json& file) {
    const Path path = mutator.any_path(file);
    const std::string name = mutator.misspelt(path.back());
    if (name.empty() || name[0] == '_') return;  // a remark
    Path other = path.parent_pointer();
    other.push_back(name);
    if (file.contains(other)) return;
    const Outcome outcome = outcome_of(renamed(file, path, name).dump());
    EXPECT_TRUE(names(outcome.error + outcome.remarks, other))
        << path.to_string() << " as " << other.to_string() << ": "
        << outcome.error << outcome.remarks;
  });
}

// Without an error, the second of two equal keys would win.
TEST_F(EngineConfigMutations, AKeyThatStandsTwiceIsAnError) {
  on_many(500, [](Mutator& mutator, const Json& file) {
    const Path path = mutator.any_path(file);
    // In the text, the placeholder becomes a second copy of the key
    Json json = file;
    parent_of(json, path)["TWICE"] = file[path];
    std::string text = json.dump();
    text.replace(text.find("\"TWICE\""), 7, "\"" + path.back() + "\"");
    EXPECT_NE(outcome_of(text).error.find("stands twice"), std::string::npos)
        << text;
  });
}

TEST_F(EngineConfigMutations, AnotherValueActsOrIsNamed) {
  on_many(700, [](Mutator& mutator, const Json& file) {
    const Path path = mutator.any_path(file);
    const Json& value = values()[mutator.below(values().size())];
    Json json = file;
    json[path] = value;
    const Outcome outcome = outcome_of(json.dump());
    if (!outcome.error.empty() || names(outcome.remarks, path)) return;
    if (outcome.json != outcome_of(file.dump()).json) return;
    // The config already had this value: from "auto", or as its default
    const Json kept = Json::parse(outcome.json);
    // True and false are numbers, too
    const Json number =
        value.is_boolean() ? Json(value.get<bool>() ? 1 : 0) : value;
    const auto is_value = [&](const Json& other) {
      return other == value || other == number;
    };
    EXPECT_TRUE(value == Json::object() || is_value(file[path]) ||
                (kept.contains(path) && is_value(kept[path])))
        << path.to_string() << ": " << value;
  });
}

TEST_F(EngineConfigMutations, ATruncatedFileIsAnError) {
  on_many(500, [](Mutator& mutator, const Json& file) {
    const std::string text = file.dump();
    const std::string part = text.substr(0, mutator.below(text.size()));
    EXPECT_NE(outcome_of(part).error, "") << part;
  });
}

// Only this library's errors: any other exception fails the test.
TEST_F(EngineConfigMutations, NoiseDoesNoHarm) {
  on_many(1000, [](Mutator& mutator, const Json& file) {
    outcome_of(mutator.noise(file.dump(/*indent=*/1)));
  });
}

}  // namespace
}  // namespace shardbook::engine
