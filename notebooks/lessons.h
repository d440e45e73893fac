#pragma once

// What the headers of the lessons share: normal numbers, options of runs, what
// a report says of memory, quantities with their units, bars and tables.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "chapters/programs/sweep.h"
#include "core/ops.h"
#include "notebooks/display.h"

namespace shardbook::notebook {

using Cells = std::vector<std::string>;
using Rows = std::vector<Cells>;

/// The parts as one text: joined("t = ", 4) is "t = 4".
template <typename... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// A row of a table: the parts, each as a text.
template <typename... Parts>
Cells cells(const Parts&... parts) {
  return {joined(parts)...};
}

/// make(item) for each item.
template <typename Items, typename Make>
auto mapped(const Items& items, const Make& make) {
  std::vector<decltype(make(*std::begin(items)))> all;
  for (const auto& item : items) all.push_back(make(item));
  return all;
}

/// The same for each pair of an item and one of `others`.
template <typename Items, typename Others, typename Make>
auto mapped(const Items& items, const Others& others, const Make& make) {
  std::vector<decltype(make(*std::begin(items), *std::begin(others)))> all;
  for (const auto& item : items) {
    for (const auto& other : others) all.push_back(make(item, other));
  }
  return all;
}

/// A table with these titles, and the cells row(item) for each item.
template <typename Items, typename Row>
Picture table_of(const Cells& titles, const Items& items, const Row& row) {
  Rows rows = mapped(items, row);
  rows.insert(rows.begin(), titles);
  return table(rows);
}

/// The text that `make` returns, or the message with which it fails, as a line.
template <typename Make>
std::string text_or_error(const Make& make) {
  try {
    return joined(make(), "\n");
  } catch (const std::exception& error) {
    return joined(error.what(), "\n");
  }
}

/// Normal numbers in f64 that depend on seed and name alone.
inline Tensor numbers(const Shape& shape, const std::string& name,
                      double mean = 0, std::uint64_t seed = 1) {
  const Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  fill_normal(x, seed, stream_of(name), mean, /*stddev=*/1);
  return x;
}

inline std::string error_text(double error) {
  return error < 1e-12 ? "less than 1e-12" : fixed(error, 2);
}

/// The most bytes of one kind at one time, on a rank.
inline double peak_of(const RankReport& rank, MemoryKind kind) {
  return rank.peak[static_cast<std::size_t>(kind)].counted;
}
/// The same on the first rank.
inline double peak_of(const Report& report, MemoryKind kind) {
  return peak_of(report.ranks[0], kind);
}

/// gpt-nano on a random walk: the end of a line that trains in a moment. The
/// loss begins near ln 256 = 5.55.
inline const std::string kNano = " --model gpt-nano --data walk --seq 32";
/// On shapes alone, in virtual time.
inline const std::string kTextbook =
    " --backend sim --cluster textbook --data random";
inline const std::string kA100s =
    " --backend sim --cluster dgx-a100 --data random";

/// The options of a line (chapters/programs/programs.h) for what a report does
/// not say: the shared ones, and those in the structs `own` of its chapter.
template <typename... Own>
Options options_of(const std::string& text, Own&... own) {
  std::istringstream words(text);
  CommandLine line(
      std::vector<std::string>{std::istream_iterator<std::string>(words), {}});
  Options options;
  add_shared_options(line, options);
  (add_options(line, own), ...);
  line.parse();
  return options;
}

/// The values of a sweep as bars: "t = 4" for the place 4.
inline std::vector<Bar> bars_of(const std::string& title,
                                const std::vector<pictures::Value>& values) {
  return mapped(values, [&](const pictures::Value& each) {
    return Bar{joined(title, each.x), each.y};
  });
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

/// The largest of(rank) of a run.
template <typename Of>
double most_of(const Report& report, const Of& of) {
  double most = 0;
  for (const RankReport& rank : report.ranks) most = std::max(most, of(rank));
  return most;
}

/// The most activations of the first rank, and whether the run trains as one
/// device does.
inline Bar activation_bar(const std::string& name, const Report& report) {
  const double bytes = peak_of(report, MemoryKind::kActivation);
  return {name, bytes, 0,
          kib(bytes) + (report.parity.passed ? ", equal" : ", DIFFERENT")};
}

/// A row for each rank, with its number and then its values.
inline Picture by_rank(const Cells& titles,
                       const std::vector<std::vector<double>>& ranks,
                       int digits) {
  Rows rows = {titles};
  for (const std::vector<double>& rank : ranks) {
    rows.push_back(cells(rows.size() - 1));
    for (const double value : rank) rows.back().push_back(fixed(value, digits));
  }
  return table(rows);
}

/// What the ledger books for a call on `numel` elements of `ranks` ranks.
inline double booked_elements(CommOp op, double numel, double ranks) {
  CommRecord record;
  record.op = op;
  record.group_size = static_cast<int>(ranks);
  record.numel = static_cast<std::int64_t>(numel);
  return wire_elements(record);
}
/// The same for what FSDP calls: two all-gathers and a reduce-scatter.
inline double booked_by_fsdp(double numel, double ranks) {
  return 2 * booked_elements(CommOp::kAllGather, numel, ranks) +
         booked_elements(CommOp::kReduceScatter, numel, ranks);
}
/// The elements of all calls of a rank.
inline double sent_elements(const std::vector<CommRecord>& records) {
  double elements = 0;
  for (const CommRecord& record : records) elements += wire_elements(record);
  return elements;
}

}  // namespace shardbook::notebook
