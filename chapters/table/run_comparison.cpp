#include "chapters/pictures/text_table.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"

namespace shardbook::table {

std::string format_comparison(const std::vector<ProgramRun>& runs) {
  std::vector<pictures::text_table::Row> rows = {
      {"run", "set", "step", "peak memory", "sent per step", "idle"}};
  std::string last;
  for (const ComparedRuns& line : compare_sets(runs)) {
    last.clear();
    for (const ProgramRun* run : line.runs) {
      const std::string name = run_name(*run);
      rows.push_back({name == last ? "" : name, run->set});
      for (const auto& cell : compared_cells(*run, *line.runs.front())) {
        rows.back().push_back(cell.empty() ? "-" : cell);
      }
      last = name;
    }
  }
  return pictures::text_table::align(rows) +
         "\nIn brackets: the ratio to the first set. step: virtual "
         "time, or wall time without a cluster.\n";
}

}  // namespace shardbook::table
