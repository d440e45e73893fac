#pragma once

// What the headers of the lessons share: normal numbers, what a report says of
// memory, quantities with their units, and tables by rank.

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "core/ops.h"
#include "notebooks/display.h"

namespace shardbook::notebook {

using Rows = std::vector<std::vector<std::string>>;

/// The parts as one text: joined("t = ", 4) is "t = 4".
template <typename... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Normal numbers in f64 that depend on seed and name alone.
inline Tensor numbers(const Shape& shape, const std::string& name,
                      double mean = 0, std::uint64_t seed = 1) {
  const Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  fill_normal(x, seed, stream_of(name), mean, /*stddev=*/1);
  return x;
}

/// The most bytes of one kind at one time, on a rank.
inline double peak_of(const RankReport& rank, MemoryKind kind) {
  return rank.peak[static_cast<std::size_t>(kind)].counted;
}
/// The same on the first rank.
inline double peak_of(const Report& report, MemoryKind kind) {
  return peak_of(report.ranks[0], kind);
}

/// gpt-nano on a random walk, samples of 32 tokens, on ranks of this process.
/// The loss begins near ln 256 = 5.55.
inline Options nano_options(const std::string& chapter, int ranks,
                            std::int64_t batch, std::int64_t steps) {
  Options options;
  options.chapter = chapter;
  options.model = "gpt-nano";
  options.data = "walk";
  options.world_size = ranks;
  options.batch = batch;
  options.seq = 32;
  options.steps = steps;
  return options;
}

/// Eight ranks of the cluster `textbook`, on shapes alone, in virtual time.
inline Options textbook_options(const std::string& chapter,
                                const std::string& model, std::int64_t batch,
                                std::int64_t seq, std::int64_t steps) {
  Options options = nano_options(chapter, 8, batch, steps);
  options.backend = "sim";
  options.cluster = "textbook";
  options.model = model;
  options.data = "random";
  options.seq = seq;
  return options;
}

inline std::string kib(double bytes) { return fixed(bytes / 1024, 0) + " KiB"; }
inline std::string gib(double bytes, int digits) {
  return fixed(bytes / (1 << 30), digits) + " GiB";
}
inline std::string ms(double seconds, int digits) {
  return fixed(1e3 * seconds, digits) + " ms";
}
inline std::string percent(double share, int digits) {
  return fixed(100 * share, digits) + " %";
}

/// The most activations of the first rank, and whether the run trains as one
/// device does.
inline Bar activation_bar(const std::string& name, const Report& report) {
  const double bytes = peak_of(report, MemoryKind::kActivation);
  return {name, bytes, 0,
          kib(bytes) + (report.parity.passed ? ", equal" : ", DIFFERENT")};
}

/// A row for each rank, with its number and then its values.
inline Picture by_rank(const std::vector<std::string>& titles,
                       const std::vector<std::vector<double>>& ranks,
                       int digits) {
  Rows rows = {titles};
  for (const std::vector<double>& rank : ranks) {
    std::vector<std::string> row = {std::to_string(rows.size() - 1)};
    for (const double value : rank) row.push_back(fixed(value, digits));
    rows.push_back(row);
  }
  return table(rows);
}

/// What the ledger books for a call on `numel` elements of `ranks`
/// ranks.
inline double booked_elements(CommOp op, double numel, double ranks) {
  CommRecord record;
  record.op = op;
  record.group_size = static_cast<int>(ranks);
  record.numel = static_cast<std::int64_t>(numel);
  return wire_elements(record);
}
/// The elements of all calls of a rank.
inline double sent_elements(const std::vector<CommRecord>& records) {
  double elements = 0;
  for (const CommRecord& record : records) elements += wire_elements(record);
  return elements;
}

}  // namespace shardbook::notebook
