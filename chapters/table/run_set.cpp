#include "chapters/table/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "core/check.h"
#include "sim/timeline_text.h"

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

/// `text`, what it was trained on, and the memory `per` what.
std::string setting_of(const ProgramRun& run, std::string text,
                       const char* per) {
  if (!run.samples.empty()) text += (text.empty() ? "" : ", ") + run.samples;
  if (run.virtual_run) text += " on " + run.virtual_run->cluster;
  if (run.capacity_bytes > 0) {
    text +=
        fmt::format(" ({} GB{})", format_gigabytes(run.capacity_bytes), per);
  }
  return text;
}

}  // namespace

RunSet read_run_set(const std::string& path) {
  if (!fs::is_directory(path)) return {{read_run(read_file(path), path)}};
  const fs::path folder = path;
  const std::string rows = (folder / "rows.tsv").string();
  RunSet set;
  set.name = folder.lexically_normal().filename().string();
  std::istringstream lines(read_file(rows));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# ", 0) == 0) {
      if (set.remark.empty()) set.remark = line.substr(2);
      continue;
    }
    const std::vector<std::string> cells = cells_of(line);
    SB_CHECK(cells.size() == 4, rows, ": '", line, "' has ", cells.size(),
             " columns; it needs file, title, label and command");
    const std::string file = (folder / cells[0]).string();
    ProgramRun run = read_run(read_file(file), file);
    run.title = cells[1];
    run.is_in_overview = cells[2].rfind('*', 0) == 0;
    run.label = cells[2].substr(run.is_in_overview ? 1 : 0);
    run.command = cells[3];
    run.set = set.name;
    set.runs.push_back(std::move(run));
  }
  return set;
}

Chosen pointers_to(const Runs& runs) {
  Chosen all;
  for (const ProgramRun& run : runs) all.push_back(&run);
  return all;
}

Chosen trained_runs(const Runs& runs) {
  Chosen trained;
  for (const ProgramRun& run : runs) {
    if (run.backend != "sim") trained.push_back(&run);
  }
  return trained;
}

std::vector<RunGroup> simulated_groups(const Runs& runs) {
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

std::vector<Chosen> compare_sets(const Runs& runs) {
  std::set<std::string> sets;
  for (const ProgramRun& run : runs) sets.insert(run.set);
  if (runs.size() == sets.size()) return {pointers_to(runs)};
  // Rows of one set may share a name: they are paired in their order.
  std::map<std::tuple<std::string, std::string, std::string>, int> seen;
  return group_by(pointers_to(runs), [&](const ProgramRun& run) {
    const std::string name = run_name(run);
    return std::tuple(run.title, name, seen[{run.set, run.title, name}]++);
  });
}

std::string speed_up_text(const ProgramRun& run, const ProgramRun* one) {
  if (one == nullptr || !run.virtual_run || step_of(run) <= 0) return "";
  const double times = step_of(*one) / step_of(run);
  const std::string ratio = fmt::format("{:.{}f}", times, times < 1000 ? 2 : 0);
  return fits(run) && fits(*one) ? ratio : "(" + ratio + ")";
}

void add_once(std::vector<std::string>& texts, const std::string& text) {
  if (std::ranges::find(texts, text) == texts.end()) {
    texts.push_back(text);
  }
}

std::string other_trainings_text(const Chosen& runs) {
  std::vector<std::string> texts;
  for (const ProgramRun* run : runs) {
    if (run->other_training.empty()) continue;
    const std::string name = run_name(*run);
    add_once(texts,
             name.substr(0, name.size() - 1) + ": " + run->other_training);
  }
  if (texts.empty()) return "";
  return fmt::format("*: other numbers than one device's ({}).",
                     fmt::join(texts, "; "));
}

std::string format_difference(double value) {
  return value == 0 ? "exact" : fmt::format("{:.1e}", value);
}

bool fits(const ProgramRun& run) {
  return run.capacity_bytes == 0 || run.peak_bytes <= run.capacity_bytes;
}

double step_of(const ProgramRun& run) {
  return run.virtual_run ? run.virtual_run->step_s.counted : run.wall_step_s;
}

double sent_per_step(const ProgramRun& run) {
  if (run.sent_bytes < 0 || run.steps == 0) return run.sent_bytes;
  return run.sent_bytes / static_cast<double>(run.steps);
}

std::string run_name(const ProgramRun& run) {
  const std::string mark = run.other_training.empty() ? "" : "*";
  if (!run.label.empty()) return run.label + mark;
  return run.chapter + (run.variant.empty() ? "" : " " + run.variant) + mark;
}

std::string world_name(const ProgramRun& run, const std::string& times) {
  if (run.world_size == 1) return "1 rank";
  return fmt::format("{}{}{}", run.backend, times, run.world_size);
}

std::string setting_of(const ProgramRun& run) {
  return setting_of(run, run.setting, " per device");
}

std::string short_setting_of(const ProgramRun& run) {
  std::string model = run.setting.substr(0, run.setting.find(", "));
  if (model.find('(') != std::string::npos) model.clear();
  return setting_of(run, model, "");
}

std::string format_gigabytes(double bytes) {
  const double value = bytes / 1e9;
  const int decimals = value >= 99.95 || value == std::round(value) ? 0
                       : value >= 9.95                              ? 1
                                                                    : 2;
  return fmt::format("{:.{}f}", value, decimals);
}

}  // namespace shardbook::table
