#include "bench/validate/kinds.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace shardbook::validate {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

std::vector<std::string> missing(const Kind& kind,
                                 const std::vector<std::string>& columns) {
  std::vector<std::string> result;
  for (const std::string& name : kind.columns) {
    if (std::find(columns.begin(), columns.end(), name) == columns.end()) {
      result.push_back(name);
    }
  }
  return result;
}

}  // namespace

Aim digits_aim() {
  return {AimKind::kDigits, 0, "every row to the printed digit"};
}

Aim worst_aim(double limit, const std::string& text) {
  return {AimKind::kWorst, limit, text};
}

Aim mean_aim(double limit, const std::string& text) {
  return {AimKind::kMean, limit, text};
}

Aim order_aim(double limit, const std::string& text) {
  return {AimKind::kOrder, limit, text};
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = [] {
    std::vector<Kind> result;
    for (const auto& some :
         {memory_kinds(), nccl_kinds(), pipeline_kinds(), training_kinds(),
          gpipe_kinds(), model_parallel_kinds(), tensor_kinds(),
          sequence_kinds(), hybrid_kinds(), h100_kinds(),
          megatron_memory_kinds()}) {
      result.insert(result.end(), some.begin(), some.end());
    }
    return result;
  }();
  return all;
}

const Kind& recognise(const std::string& label,
                      const std::vector<std::string>& columns) {
  const Kind* best = nullptr;
  const Kind* nearest = nullptr;
  for (const Kind& kind : kinds()) {
    const std::size_t num_missing = missing(kind, columns).size();
    if (num_missing == 0 &&
        (best == nullptr || kind.columns.size() > best->columns.size())) {
      best = &kind;
    }
    if (nearest == nullptr || num_missing < missing(*nearest, columns).size()) {
      nearest = &kind;
    }
  }
  if (best != nullptr) return *best;
  std::string known;
  for (const Kind& kind : kinds()) {
    known += (known.empty() ? "" : ", ") + kind.name;
  }
  SB_FAIL(label, ": no known kind of table has the columns ", joined(columns),
          "; known are ", known, ". The nearest is ", nearest->name,
          ", which also needs ", joined(missing(*nearest, columns)));
}

double last_digit(const std::string& printed) {
  const std::size_t point = printed.find('.');
  if (point == std::string::npos) return 1;
  return std::pow(10.0, -static_cast<double>(printed.size() - point - 1));
}

bool is_printed_as(double value, double printed, double last_digit) {
  const double digits = std::round(printed / last_digit);
  // Decimal halves are not exact in binary
  constexpr double kHalf = 0.5 + 1e-9;
  return std::floor(value / last_digit + kHalf) == digits ||
         std::floor(value / last_digit + 1e-9) == digits;
}

}  // namespace shardbook::validate
