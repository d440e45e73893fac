#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "chapters/table/internal/text_table.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using internal::align;
using internal::Row;

struct Key {
  std::string title, name;
  int number = 0;  // of rows with one name
  bool operator<(const Key& other) const {
    return std::tie(title, name, number) <
           std::tie(other.title, other.name, other.number);
  }
};

std::vector<std::string> sets_of(const std::vector<ProgramRun>& runs) {
  std::vector<std::string> sets;
  for (const ProgramRun& run : runs) {
    if (std::find(sets.begin(), sets.end(), run.set) == sets.end()) {
      sets.push_back(run.set);
    }
  }
  return sets;
}

double step_s(const ProgramRun& run) {
  return run.virtual_run ? run.virtual_run->step_s.counted : run.wall_step_s;
}

// " (1.25)": by how much a value has changed since the first set.
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
  const std::size_t num_sets = sets_of(runs).size();
  const bool one_each = runs.size() == num_sets;
  std::vector<Key> order;
  std::map<Key, std::vector<const ProgramRun*>> lines;
  std::map<std::string, std::map<std::string, int>> seen;
  for (const ProgramRun& run : runs) {
    Key key = {run.title, run_name(run), 0};
    key.number = seen[run.set][run.title + "\t" + key.name]++;
    if (one_each) key = {};
    if (lines.count(key) == 0) order.push_back(key);
    lines[key].push_back(&run);
  }
  std::vector<Row> rows = {
      {"run", "set", "step", "peak memory", "sent per step", "idle"}};
  for (const Key& key : order) {
    for (const ProgramRun* run : lines[key]) {
      const bool first = run == lines[key].front();
      rows.push_back(
          row_of(first || one_each ? run_name(*run) : "", *run,
                 *lines[key].front()));
    }
  }
  return align(rows) +
         "\nIn brackets: times as much as in the first set. step: virtual "
         "time, or wall time without a cluster.\n";
}

}  // namespace shardbook::table
