#pragma once

// Decoders of transformers, by model_type: what their layers are, which keys of
// config.json say so, and what an absent key means. A class is a row of a table,
// a line of `name=key?null:absent` for each number in which it differs from the
// row that it is based on (counted_families.cpp).

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace shardbook::counted_families {

/// One number of a class. Expressions have integers, yes, no, names of other
/// numbers, + - * / from left to right, and switch(if on, if off).
struct Number {
  std::vector<std::string> keys;  ///< all names of it in files; empty: fixed
  bool may_be_null = false;
  std::string if_null,
      absent;  ///< expressions; `absent` empty: has to be given

  /// True or false in files.
  bool is_switch() const { return absent == "yes" || absent == "no"; }
};

struct CountedClass {
  std::string type;
  std::map<std::string, Number> numbers;
  /// Keys with the only values, as JSON, that the layers here agree with: "1|null".
  /// After "each:", a list of those of all elements; after "=", an expression.
  std::map<std::string, std::string> fixed;
  /// Keys of the class that have no effect on the count, and have one in others.
  std::vector<std::string> idle;
};

/// An expression's value, where `number` returns those of names.
std::int64_t evaluate(
    const std::string& text,
    const std::function<std::int64_t(const std::string& name)>& number);

/// All model_types of the table.
const std::vector<std::string>& types();
bool is_known(const std::string& type);
const CountedClass& family_of(const std::string& type);
/// Keys without effect on the count in any of these classes.
const std::vector<std::string>& keys_passed_over();
/// Of these, the keys that training may refuse: a remark names them.
const std::vector<std::string>& keys_of_training();

}  // namespace shardbook::counted_families
