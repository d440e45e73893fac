#include "chapters/table/run_set.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "core/check.h"

namespace shardbook::table {
namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  SB_CHECK(file && !file.bad(), path, ": this file cannot be read");
  SB_CHECK(!text.empty(), path, ": this file is empty");
  return text;
}

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, '\t');) {
    cells.push_back(cell);
  }
  return cells;
}

bool is_remark(const std::string& line) { return line.rfind("# ", 0) == 0; }

}  // namespace

std::vector<ProgramRun> read_run_set(const std::string& path) {
  if (!fs::is_directory(path)) return {read_run(read_file(path), path)};
  const fs::path folder = path;
  const std::string rows = (folder / "rows.tsv").string();
  std::vector<ProgramRun> runs;
  std::istringstream lines(read_file(rows));
  for (std::string line; std::getline(lines, line);) {
    if (is_remark(line)) continue;
    const std::vector<std::string> cells = cells_of(line);
    SB_CHECK(cells.size() == 4, rows, ": '", line, "' has ", cells.size(),
             " columns; it needs file, title, label and command");
    const std::string file = (folder / cells[0]).string();
    ProgramRun run = read_run(read_file(file), file);
    run.title = cells[1];
    run.label = cells[2];
    run.command = cells[3];
    run.set = fs::path(path).lexically_normal().filename().string();
    runs.push_back(std::move(run));
  }
  return runs;
}

std::string read_remark(const std::string& path) {
  if (!fs::is_directory(path)) return "";
  std::istringstream lines(read_file((fs::path(path) / "rows.tsv").string()));
  for (std::string line; std::getline(lines, line);) {
    if (is_remark(line)) return line.substr(2);
  }
  return "";
}

std::vector<const ProgramRun*> trained_runs(
    const std::vector<ProgramRun>& runs) {
  std::vector<const ProgramRun*> trained;
  for (const ProgramRun& run : runs) {
    if (run.backend != "sim") trained.push_back(&run);
  }
  return trained;
}

std::vector<RunGroup> simulated_groups(const std::vector<ProgramRun>& runs) {
  std::vector<RunGroup> groups;
  for (const ProgramRun& run : runs) {
    if (run.backend != "sim") continue;
    const bool joins =
        !groups.empty() && groups.back().title == run.title &&
        setting_of(*groups.back().runs.front()) == setting_of(run);
    if (!joins) groups.push_back({run.title, {}});
    groups.back().runs.push_back(&run);
  }
  return groups;
}

const ProgramRun* yardstick(const RunGroup& group) {
  for (const ProgramRun* run : group.runs) {
    if (run->world_size == 1 && run->virtual_run) return run;
  }
  return nullptr;
}

std::vector<ComparedRuns> compare_sets(const std::vector<ProgramRun>& runs) {
  std::set<std::string> sets;
  for (const ProgramRun& run : runs) sets.insert(run.set);
  const bool one_each = runs.size() == sets.size();
  // Rows of one set may share a name: they are paired in their order.
  using Key = std::tuple<std::string, std::string, int>;
  std::map<Key, std::size_t> lines;
  std::map<std::tuple<std::string, std::string, std::string>, int> seen;
  std::vector<ComparedRuns> compared;
  for (const ProgramRun& run : runs) {
    Key key = {run.title, run_name(run),
               seen[{run.set, run.title, run_name(run)}]++};
    if (one_each) key = {};
    const auto [line, added] = lines.try_emplace(key, compared.size());
    if (added) compared.emplace_back();
    compared[line->second].runs.push_back(&run);
  }
  return compared;
}

std::string setting_of(const ProgramRun& run) {
  std::string text = run.setting;
  if (!run.samples.empty()) text += (text.empty() ? "" : ", ") + run.samples;
  if (run.virtual_run) text += " on " + run.virtual_run->cluster;
  if (run.capacity_bytes > 0) {
    text += fmt::format(" ({} GB per device)",
                        format_gigabytes(run.capacity_bytes));
  }
  return text;
}

std::string format_gigabytes(double bytes) {
  const double value = bytes / 1e9;
  const int decimals = value >= 99.95 || value == std::round(value) ? 0
                       : value >= 9.95                              ? 1
                                                                    : 2;
  return fmt::format("{:.{}f}", value, decimals);
}

}  // namespace shardbook::table
