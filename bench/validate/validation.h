#pragma once

// One table: a prediction for every row, and their statistics.

#include <string>
#include <utility>
#include <vector>

#include "bench/validate/kinds.h"

namespace shardbook::validate {

struct Validation {
  std::string file;
  const Kind* kind = nullptr;
  std::vector<Outcome> outcomes;
  /// Row and reason.
  std::vector<std::pair<std::string, std::string>> not_expressed;

  int num_aimed_at = 0;
  double mape = 0, null_mape = 0;
  /// Errors of the rows that count towards the aim.
  double aimed_mape = 0, aimed_worst = 0;
  int num_as_printed = 0;  ///< of the rows whose digits are known
  Contests contests;
  bool meets_aim = false;
};

/// Throws Error for tables and values that make no sense.
Validation validate(const Table& table);

/// For people, and as one line of JSON.
std::string as_text(const Validation& validation);
std::string as_json(const Validation& validation);

}  // namespace shardbook::validate
