#pragma once

// The table that `./shardbook run` ends with: one row per program run, side
// by side, with the claims of each. A program run is the JSON object that a
// chapter prints under `--format json`.
//
//   chapter           world       loss         numbers    bytes sent  ...
//   00_single_device  1 rank      5.55 → 2.91  ✓ exact    ✓ 0 B       ...
//   02_ddp            threads ×2  5.55 → 2.91  ✓ 3.1e-07  ✓ 3.2 MiB   ...

#include <cstdint>
#include <string>
#include <vector>

namespace shardbook::table {

enum class Verdict { kPassed, kFailed, kNotMeasured };

/// One claim of one run: what it measured and, when it failed, how.
struct Claim {
  Verdict verdict = Verdict::kNotMeasured;
  std::string value;    // "3.1e-07", "3.2 MiB"; empty when not measured
  std::string failure;  // one sentence without a full stop
};

/// One program run, ready to be shown.
struct ProgramRun {
  std::string chapter;
  std::string backend;
  int world_size = 1;
  std::vector<std::string> loss;  // first and last step; empty: not measured
  Claim numbers, bytes, memory, time;
};

/// How marks and arrows are written.
enum class Charset { kUtf8, kAscii };

/// Reads the JSON object of one run; `source` names it in messages. Values
/// that a chapter does not measure may be missing.
///
/// Throws shardbook::Error when the text is no JSON object, when the chapter,
/// its world or its claims are missing, or when a value has the wrong type.
ProgramRun read_run(const std::string& text, const std::string& source);

/// Lays out the table, at most 100 columns wide, a legend, and a sentence for
/// each claim that failed.
std::string format_table(const std::vector<ProgramRun>& runs, Charset charset);

/// The number of claims of all runs that failed.
int count_failures(const std::vector<ProgramRun>& runs);

/// "0 B", "999 B", "1.5 KiB", "12.3 MiB", "119 GiB".
std::string format_bytes(std::int64_t bytes);

/// "850 us", "41.2 ms", "1.30 s".
std::string format_seconds(double seconds);

}  // namespace shardbook::table
