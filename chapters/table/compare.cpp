#include "chapters/table/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "chapters/pictures/text_table.h"
#include "chapters/pictures/units.h"
#include "chapters/table/run.h"

namespace shardbook::table {
namespace {

using pictures::text_table::kColumns;
using pictures::text_table::width;
using pictures::text_table::wrap;

constexpr const char* kNotMeasured = "-";

using pictures::Unit;
const std::vector<Unit> kSeconds = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
const std::vector<Unit> kBytes = {
    {"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}};

/// Values from 0 up, in one unit, with three digits of the smallest unless the
/// largest is long; a negative value was not measured.
ComparedColumn column_of(const std::string& name,
                         const std::vector<double>& values,
                         const std::vector<Unit>& units,
                         const std::string& meaning) {
  double smallest = 0, largest = 0;
  for (const double value : values) {
    if (value > 0 && (smallest == 0 || value < smallest)) smallest = value;
    largest = std::max(largest, value);
  }
  // The largest unit in which no value but 0 is below a half
  const Unit unit = pictures::largest_below(2 * smallest, units);
  const double shown = smallest / unit.size;
  const bool is_long = largest / unit.size >= 1e5;
  const int decimals = is_long || shown >= 99.95 ? 0 : shown >= 9.995 ? 1 : 2;
  ComparedColumn column{name, unit.name, meaning, {}};
  for (const double value : values) {
    column.cells.push_back(
        value < 0    ? kNotMeasured
        : value == 0 ? "0"
                     : fmt::format("{:.{}f}", value / unit.size, decimals));
  }
  return column;
}

template <typename ValueOf>
std::vector<double> values_of(const Runs& runs, ValueOf value_of) {
  std::vector<double> values;
  for (const ProgramRun& run : runs) values.push_back(value_of(run));
  return values;
}

/// Virtual time compares with virtual time only.
bool have_virtual_time(const Runs& runs) {
  return std::ranges::all_of(runs, [](const ProgramRun& run) {
    return run.virtual_run && run.device != "cuda";
  });
}

bool train_the_same(const ProgramRun& a, const ProgramRun& b) {
  return a.setting == b.setting && a.samples == b.samples;
}

const ProgramRun* yardstick_of(const Runs& runs) {
  return runs.front().world_size == 1 ? &runs.front() : nullptr;
}

ComparedColumn speed_ups(const Runs& runs, const std::vector<double>& step_s) {
  ComparedColumn column{"speed-up", "", "over one device", {}};
  const ProgramRun* one = yardstick_of(runs);
  bool all_fit = true;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool is_known = one != nullptr && step_s[0] > 0 && step_s[i] > 0 &&
                          train_the_same(runs[i], *one);
    const bool fit = fits(runs[i]) && (one == nullptr || fits(*one));
    const std::string ratio =
        is_known ? fmt::format("{:.2f}", step_s[0] / step_s[i]) : kNotMeasured;
    column.cells.push_back(fit || !is_known ? ratio : "(" + ratio + ")");
    all_fit = all_fit && fit;
  }
  if (!all_fit) {
    column.meaning += ", in brackets if one of the two does not fit in memory";
  }
  return column;
}

ComparedColumn peaks(const Runs& runs, const Marks& marks) {
  ComparedColumn column = column_of(
      "peak", values_of(runs, [](const auto& run) { return run.peak_bytes; }),
      kBytes, "most memory in use at one time, by the fullest rank");
  if (std::ranges::all_of(runs, fits)) return column;
  column.meaning += "; ! does not fit";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    column.cells[i] += fits(runs[i]) ? " " : marks.too_large;
  }
  return column;
}

ComparedColumn claims(const Runs& runs, const Marks& marks) {
  ComparedColumn column{"claims", "", "those that hold, of those measured", {}};
  for (const ProgramRun& run : runs) {
    const auto [failed, measured] = count_claims(run);
    column.cells.push_back(
        measured == 0
            ? kNotMeasured
            : fmt::format("{} {}/{}", failed > 0 ? marks.failed : marks.passed,
                          measured - failed, measured));
  }
  return column;
}

/// Numbers at the right of their columns; a name that is too long has lines of its
/// own.
std::string rows_text(const Runs& runs,
                      const std::vector<ComparedColumn>& columns) {
  std::vector<std::string> lines(runs.size() + 2), labels(2);
  for (const ComparedColumn& column : columns) {
    std::vector<std::string> cells = {column.name, column.unit};
    cells.insert(cells.end(), column.cells.begin(), column.cells.end());
    std::size_t widest = 0;
    for (const std::string& cell : cells) {
      widest = std::max(widest, width(cell));
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      lines[i].append(2 + widest - width(cells[i]), ' ').append(cells[i]);
    }
  }
  const std::size_t room = kColumns - std::min(width(lines[0]), kColumns);
  std::size_t label_width = 0;
  for (const ProgramRun& run : runs) {
    labels.push_back(run_name(run));
    const std::size_t wide = width(labels.back());
    if (wide <= room) label_width = std::max(label_width, wide);
  }
  std::string text;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string& label = labels[i];
    if (width(label) > label_width) text += wrap(std::exchange(label, ""));
    std::string line =
        label + std::string(label_width - width(label), ' ') + lines[i];
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace

const char* const kComparedTitle = "Compared";

bool are_compared(const Runs& runs) {
  return !runs.empty() && std::ranges::all_of(runs, [](const ProgramRun& run) {
    return run.title == kComparedTitle;
  });
}

ComparedTable compare_runs(const Runs& runs, const Marks& marks) {
  const bool is_virtual = have_virtual_time(runs);
  const std::vector<double> step_s = values_of(runs, [&](const auto& run) {
    return is_virtual ? run.virtual_run->step_s.counted : run.wall_step_s;
  });
  ComparedTable table{setting_of(runs.front()), {}, {}};
  ComparedColumn devices{"devices", "", "", {}}, losses{"loss", "", "", {}};
  losses.meaning = "of the last step";
  for (const ProgramRun& run : runs) {
    devices.cells.push_back(fmt::format("{}", run.world_size));
    losses.cells.push_back(run.loss.empty() ? kNotMeasured : run.loss.back());
    const bool same = train_the_same(run, runs.front());
    if (same && (!is_virtual || setting_of(run) == table.setting)) continue;
    table.remarks.push_back(run_name(run) + ": " + setting_of(run) +
                            (same ? "." : "; without a speed-up."));
  }
  table.columns = {
      devices,
      column_of("step", step_s, kSeconds,
                is_virtual ? "virtual time on " + runs[0].virtual_run->cluster
                           : "wall time on this machine"),
      speed_ups(runs, step_s),
      peaks(runs, marks),
      column_of("sent", values_of(runs, sent_per_step), kBytes,
                "bytes per step, by the busiest rank"),
      losses};
  if (is_virtual) {
    ComparedColumn idle{
        "idle", "%", "share of the step in which a rank computes nothing", {}};
    for (const ProgramRun& run : runs) {
      idle.cells.push_back(
          fmt::format("{:.1f}", 100 * run.virtual_run->idle_share));
    }
    table.columns.insert(table.columns.end() - 1, idle);
  }
  // Runs on shapes train nothing
  if (!trained_runs(runs).empty()) table.columns.push_back(claims(runs, marks));
  std::erase_if(table.columns, [](const ComparedColumn& column) {
    return std::ranges::all_of(column.cells, [](const std::string& cell) {
      return cell[0] == kNotMeasured[0];
    });
  });
  return table;
}

std::vector<std::string> legend_of(const ComparedTable& table) {
  std::vector<std::string> legend;
  for (const ComparedColumn& column : table.columns) {
    if (column.meaning.empty()) continue;
    legend.push_back(column.name + ": " + column.meaning + ".");
  }
  return legend;
}

std::string format_compared(const Runs& runs, const Marks& marks) {
  const ComparedTable table = compare_runs(runs, marks);
  std::string text = table.setting.empty() ? "" : wrap(table.setting) + "\n";
  text += rows_text(runs, table.columns) + "\n";
  for (const std::string& remark : table.remarks) text += wrap(remark);
  return text + wrap(fmt::format("{}", fmt::join(legend_of(table), " "))) +
         other_trainings_lines(pointers_to(runs)) + "\n" +
         format_claims(runs, marks);
}

}  // namespace shardbook::table
