#include <fmt/format.h>

#include "chapters/common/pictures/text_table.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using text_table::align;
using text_table::Row;

double step_s(const ProgramRun& run) {
  return run.virtual_run ? run.virtual_run->step_s.counted : run.wall_step_s;
}

// " (1.25)": the ratio of a value to that of the first set.
std::string ratio_text(double value, double first) {
  return value >= 0 && first > 0 ? fmt::format(" ({:.2f})", value / first) : "";
}

Row row_of(const std::string& name, const ProgramRun& run,
           const ProgramRun& first) {
  const bool base = &run == &first;
  const double step = step_s(run), peak = run.peak_bytes,
               sent = sent_per_step(run);
  return {name,
          run.set,
          step < 0 ? "-"
                   : sim::seconds_text(step) +
                         (base ? "" : ratio_text(step, step_s(first))),
          peak < 0 ? "-"
                   : format_bytes(peak) +
                         (base ? "" : ratio_text(peak, first.peak_bytes)),
          sent < 0 ? "-"
                   : format_bytes(sent) +
                         (base ? "" : ratio_text(sent, sent_per_step(first))),
          run.virtual_run
              ? fmt::format("{:.1f} %", 100 * run.virtual_run->idle_share)
              : "-"};
}

}  // namespace

std::string format_comparison(const std::vector<ProgramRun>& runs) {
  std::vector<Row> rows = {
      {"run", "set", "step", "peak memory", "sent per step", "idle"}};
  std::string last;
  for (const ComparedRuns& line : compare_sets(runs)) {
    last.clear();
    for (const ProgramRun* run : line.runs) {
      const std::string name = run_name(*run);
      rows.push_back(
          row_of(name == last ? "" : name, *run, *line.runs.front()));
      last = name;
    }
  }
  return align(rows) +
         "\nIn brackets: the ratio to the first set. step: virtual "
         "time, or wall time without a cluster.\n";
}

}  // namespace shardbook::table
