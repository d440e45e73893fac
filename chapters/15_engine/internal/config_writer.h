#pragma once

// Functions over `Fields` say each key of a config once: a JsonObject reads it,
// a Writer writes it.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/15_engine/internal/config_rules.h"

namespace shardbook::engine::internal {

/// Takes the place of a JsonObject where a config is written.
class Writer {
 public:
  using Ordered = nlohmann::ordered_json;
  using Key = const std::string&;
  explicit Writer(Ordered& json) : json_(json) {}

  void flag(Key key, bool value) { json_[key] = value; }
  void text(Key key, Key value) { json_[key] = value; }
  void choice(Key key, const std::vector<std::string>&, Key value) {
    json_[key] = value;
  }
  void number(Key key, double, double, double value) { json_[key] = value; }
  void integer(Key key, int, int, int value) { json_[key] = value; }
  void whole(Key key, auto, auto, std::int64_t value) { json_[key] = value; }
  void list(Key key, const auto& values) { json_[key] = values; }
  void null(Key key) { json_[key] = nullptr; }
  void also(Key, Key) {}
  Writer section(Key key) { return Writer(json_[key] = Ordered::object()); }

 private:
  Ordered& json_;
};

inline Writer section(Writer& parent, const std::string& name) {
  return parent.section(name);
}

/// Whether a key is left out: where it is written, and has its usual value.
inline bool omits(const json_file::JsonObject&, bool) { return false; }
inline bool omits(const Writer&, bool is_usual) { return is_usual; }

void write_optimizer(Writer& root, DeepSpeedConfig& config);
void read_book(json_file::JsonObject& root, DeepSpeedConfig& config);
void write_book(Writer& root, DeepSpeedConfig& config);

}  // namespace shardbook::engine::internal
