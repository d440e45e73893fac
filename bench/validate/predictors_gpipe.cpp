// Memory of GPipe, by the formulae of its chapter.

#include <fmt/format.h>

#include <optional>
#include <regex>

#include "bench/validate/kinds.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr double kGiB = 1 << 30;

/// As the paper names them: "Transformer-13 (d_model 2048, ...)".
struct Transformer {
  double layers, hidden, inner, heads, vocab, seq;
};

std::optional<Transformer> read(const std::string& text) {
  static const std::regex pattern(
      R"(Transformer-(\d+) \(d_model (\d+), d_ff (\d+), (\d+) heads, )"
      R"(vocab (\d+)k, seq (\d+)\))");
  std::smatch found;
  if (!std::regex_match(text, found, pattern)) return std::nullopt;
  const auto value = [&](std::size_t i) { return std::stod(found[i].str()); };
  return Transformer{value(1), value(2),        value(3),
                     value(4), 1000 * value(5), value(6)};
}

/// Products with their biases, two norms per layer; tables for input and output
/// of their own.
double parameters(const Transformer& t) {
  const double layer = 4 * t.hidden * (t.hidden + 1) +
                       2 * t.hidden * t.inner + t.inner + t.hidden +
                       4 * t.hidden;
  return t.layers * layer + 2 * t.vocab * t.hidden;
}

/// What a layer keeps of one sequence in f32: 16 elements per token and hidden
/// unit as in chapters/common/memory.cpp, two masks of a byte, and of the
/// attention, which was not fused, the probabilities before and after dropout
/// with their mask. Korthikanti et al. 2022, section 4.1.
double layer_bytes(const Transformer& t) {
  return t.seq * t.hidden * (66 + 9 * t.heads * t.seq / t.hidden);
}

/// Peak over all partitions together, m micro-batches of one sequence: each
/// keeps the inputs of all of them and the activations of one; the last one
/// also logits and probabilities. Huang et al. 2019, section 2.3.
double activation_bytes(const Transformer& t, double partitions, double m) {
  const double boundary = t.seq * t.hidden * 4;
  return partitions * m * boundary + t.layers * layer_bytes(t) +
         2 * t.seq * t.vocab * 4;
}

Outcome outcome_of(const Row& row, const std::string& what,
                   const std::string& column, double bytes) {
  Outcome outcome;
  const std::string& model = row.text("model");
  outcome.row = fmt::format("{}, {}, {}",
                            model.substr(0, model.find(" (d_model")),
                            row.text("config"), what);
  outcome.unit = "GiB";
  outcome.pair.predicted = bytes / kGiB;
  outcome.pair.published = row.positive(column);
  return outcome;
}

// Parameters with gradient and one moment, and peak activations, over all
// partitions. Huang et al. 2019, table 1.
std::vector<Outcome> gpipe_memory(const Row& row) {
  const std::optional<Transformer> model = read(row.text("model"));
  const double count = model ? parameters(*model) : row.positive("params");
  std::vector<Outcome> outcomes = {
      outcome_of(row, "parameters", "param_memory_GB",
                 count * row.positive("bytes_per_param"))};
  outcomes[0].pair.null_scale = row.positive("params");
  if (model && row.text("rematerialization") == "yes") {
    const int partitions = row.count("partitions");
    outcomes.push_back(outcome_of(row, "activations", "peak_activation_GB",
                                  activation_bytes(*model, partitions, 32)));
    outcomes[1].pair.null_scale = row.positive("params");
  }
  return outcomes;
}

}  // namespace

std::vector<Kind> gpipe_kinds() {
  std::vector<Kind> kinds;
  kinds.push_back({"gpipe_table1_memory",
                   {"model", "config", "partitions", "rematerialization",
                    "params", "bytes_per_param", "param_memory_GB",
                    "peak_activation_GB"},
                   true,
                   mean_aim(0.1, "MAPE within 10 %"),
                   gpipe_memory,
                   "micro-batches are taken as single sequences (32 of them); "
                   "rows of AmoebaNet agree better in decimal GB; its "
                   "activations, and those of rows without re-materialisation, "
                   "whose batch did not fit, are not predicted"});
  return kinds;
}

}  // namespace shardbook::validate
