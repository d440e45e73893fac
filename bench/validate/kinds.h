#pragma once

// The kinds of published tables that this program can predict.
//
// A table is recognised by its columns, not by its name: any CSV with the
// columns of a kind (in any order, among others) is predicted in the same way.
// A prediction sees the columns that describe the work and the machine, never
// those that were measured. The behaviour of a machine's software is part of
// its cluster (sim/clusters). Training steps are those of the chapters in the
// `sim` world.

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/validate/statistics.h"
#include "bench/validate/table.h"
#include "sim/cluster.h"

namespace shardbook::validate {

/// Thrown for a row that no chapter can run; the reason, without the row.
class NotExpressed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Outcome {
  std::string row;   ///< what was run: "7.5B, stage 2, 64 GPUs"
  std::string unit;  ///< "TFLOP/s per GPU"
  Pair pair;
  /// "calibrated", "interpolated", "extrapolated"; "formula".
  std::string trust = "formula";
  /// One unit of the last digit that was printed; 0: unknown.
  double last_digit = 0;
  /// Whether the aim of its kind includes this row.
  bool is_aimed_at = true;
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

Aim digits_aim();
Aim worst_aim(double limit, const std::string& text);
Aim mean_aim(double limit, const std::string& text);
Aim order_aim(double limit, const std::string& text);

struct Kind {
  std::string name;
  std::vector<std::string> columns;  ///< those that it needs
  bool lower_is_better = false;
  Aim aim;
  /// Throws NotExpressed, or Error for values that make no sense.
  std::function<std::vector<Outcome>(const Row&)> predict;
  /// Quantities that no row of this kind is predicted for, and why.
  std::string note;
};

const std::vector<Kind>& kinds();
/// The kind with the most columns of those whose columns are all there. Throws
/// Error that names the columns and all kinds.
const Kind& recognise(const std::string& label,
                      const std::vector<std::string>& columns);

/// One unit of the last digit: 0.1 for "16.6".
double last_digit(const std::string& printed);
/// Whether it prints like this, rounded or cut off.
bool is_printed_as(double value, double printed, double last_digit);

// Predictors, by file.
std::vector<Kind> memory_kinds();
std::vector<Kind> nccl_kinds();
std::vector<Kind> pipeline_kinds();
std::vector<Kind> training_kinds();
std::vector<Kind> gpipe_kinds();
std::vector<Kind> model_parallel_kinds();
std::vector<Kind> tensor_kinds();
std::vector<Kind> sequence_kinds();
std::vector<Kind> hybrid_kinds();
std::vector<Kind> h100_kinds();
std::vector<Kind> megatron_memory_kinds();

}  // namespace shardbook::validate
