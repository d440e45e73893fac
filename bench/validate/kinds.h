#pragma once

// The kinds of published tables that this program can predict.
//
// A table is recognised by its columns, not by its name: any CSV with the
// columns of a kind (in any order, among others) is predicted in the same way.
// A prediction sees the columns that describe the work and the machine, never
// those that were measured. The behaviour of a machine's software is part of
// its cluster (sim/clusters). Training steps are those of the chapters in the
// `sim` world.

#include <fmt/format.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/validate/published_table.h"

namespace shardbook::validate {

/// Thrown for a row that no chapter can run; the reason, without the row.
class NotExpressed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws NotExpressed unless a chapter can run the row.
inline void require(bool can_run, const std::string& reason) {
  if (!can_run) throw NotExpressed(reason);
}

/// What `known` has for the word of a column; `absent` for an empty one. Throws
/// NotExpressed for other words.
template <typename T>
T choice(const Row& row, const char* column,
         const std::map<std::string, T>& known,
         const std::optional<T>& absent = std::nullopt) {
  if (absent && !row.has(column)) return *absent;
  const auto found = known.find(row.text(column));
  if (found != known.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, value] : known) names.push_back(name);
  throw NotExpressed(fmt::format("{} is \"{}\"; {} are known", column,
                                 row.text(column), fmt::join(names, ", ")));
}

/// The numbers in the text of a column: the groups of a regular expression; none
/// where it does not match all of the text.
std::vector<double> numbers_in(const Row& row, const char* column,
                               const char* pattern);

/// A published figure, and the prediction for it.
struct Pair {
  double predicted = 0;
  double published = 0;  ///< above 0
  /// The null model predicts c times this: 1 for a rate, the work for a time.
  double null_scale = 1;
  /// Rows of the same contest did the same work in different ways; empty:
  /// this row has no rivals.
  std::string contest = {};
};

struct Outcome {
  std::string row;   ///< what was run: "7.5B, stage 2, 64 GPUs"
  std::string unit;  ///< "TFLOP/s per GPU"
  Pair pair;
  /// "calibrated", "interpolated", "extrapolated"; "formula".
  std::string trust = "formula";
  /// One unit of the last digit that was printed; 0: unknown.
  double last_digit = 0;
  /// Whether this row counts towards the aim of its kind.
  bool is_aimed_at = true;
  /// Of rows whose units differ: it is a time.
  bool lower_is_better = false;
};

enum class AimKind {
  kDigits,  ///< each row as printed, rounded or cut off
  kWorst,   ///< each row's error
  kMean,    ///< the table's mean absolute error
  kOrder    ///< Spearman's correlation where rows compete
};
struct Aim {
  AimKind kind = AimKind::kMean;
  double limit = 0;
  std::string text;  ///< "MAPE within 15 %"
};

/// Predicts a row. Throws NotExpressed, or Error for values that make no sense.
using Predictor = std::vector<Outcome>(const Row&);

struct Kind {
  std::string name;
  std::string columns;  ///< names that it needs
  bool lower_is_better = false;
  Aim aim;
  Predictor* predict = nullptr;
  /// Quantities that are predicted for no row of this kind, and why.
  std::string note = {};
  /// Other columns that it reads; empty: whatever they are.
  std::string more = {};
};

const std::vector<Kind>& kinds();
/// Among the kinds whose columns are all there, the one with the most. Throws
/// Error that names the columns and all kinds.
const Kind& recognise(const std::string& label,
                      const std::vector<std::string>& columns);

/// Throws Error that names what a table of jobs lacks.
void check_jobs(const Table& table);

// --- How good predictions are, and how good the simplest ones would have been

/// One unit of the last digit: 0.1 for "16.6".
double last_digit(const std::string& printed);
/// Whether `value` prints as `printed`, rounded or cut off.
bool is_printed_as(double value, double printed, double last_digit);

/// predicted / published - 1.
double relative_error(const Pair& pair);
/// Mean absolute relative error, as a share; 0 for none.
double mape(const std::vector<Pair>& pairs);
/// The largest absolute relative error.
double worst_error(const std::vector<Pair>& pairs);
/// The smallest mape that predictions of c * null_scale have for any c.
double null_mape(const std::vector<Pair>& pairs);

/// Spearman's correlation of ranks; equal values share the mean of their
/// ranks. 0 when either side is constant.
double spearman(const std::vector<double>& a, const std::vector<double>& b);

/// Means over all contests of at least two rows.
struct Contests {
  int count = 0;
  int rows = 0;
  double spearman = 0;
  /// By what share the plan that the prediction picks is slower than the best
  /// measured plan.
  double regret = 0;
};
Contests judge_contests(const std::vector<Pair>& pairs, bool lower_is_better);

/// One table: a prediction for every row, and their statistics.
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

// Predictors, by the file predictors_*.cpp
Predictor model_states, largest_models, deepspeed_estimates, collective_time,
    bus_bandwidth;  // formulas
Predictor job;      // jobs
Predictor gpipe_memory, gpipe_throughput, torchgpipe, bubble_rate,
    automatic_bubble_rate, tutorial;                                // pipeline
Predictor korthikanti_layer, ring_flash_attention, ulysses_charts;  // sequence
Predictor megatron_ci;  // megatron_memory.cpp

}  // namespace shardbook::validate
