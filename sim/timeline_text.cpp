#include "sim/timeline_text.h"

#include <fmt/format.h>
#include <langinfo.h>
#include <locale.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/terminal.h"
#include "sim/timeline_step.h"

namespace shardbook::sim {
namespace {

struct Category {
  char letter;
  int color;  // of 256: backgrounds on which black letters can be read
};
// The kEventClasses in which a queue works, and one for all others.
constexpr std::array<Category, 8> kCategories = {{{'F', 75},
                                                  {'B', 215},
                                                  {'W', 222},
                                                  {'O', 114},
                                                  {'C', 177},
                                                  {'M', 109},
                                                  {'H', 180},
                                                  {'X', 250}}};
constexpr std::size_t kOther = kCategories.size() - 1;
constexpr const char* kNoColor = "\033[0m";
constexpr int kShareColumns = 7;  // "  100 %"

std::size_t category_of(const TimelineEvent& event) {
  const std::string name = class_of(event);
  for (std::size_t i = 0; i < kOther; ++i) {
    if (name == kEventClasses[i].name) return i;
  }
  return kOther;
}

// One column of the picture.
struct Cell {
  std::array<double, kCategories.size()> seconds{};  // by category
  // Micro-batches: seconds by category, label and number.
  std::map<std::tuple<std::size_t, std::string, std::string>, double> parts;
  char digit = 0;  // in place of the letter

  double busy_s() const {
    return std::accumulate(seconds.begin(), seconds.end(), 0.0);
  }
  bool is_idle() const { return busy_s() <= 0; }
  std::size_t category() const {
    return static_cast<std::size_t>(
        std::max_element(seconds.begin(), seconds.end()) - seconds.begin());
  }
  // Label and number of the micro-batch with the most time in the category;
  // empty if there is none.
  std::pair<std::string, std::string> micro_batch() const {
    std::pair<std::string, std::string> result;
    double most = 0;
    for (const auto& [part, part_s] : parts) {
      const auto& [of_category, label, number] = part;
      if (of_category != category() || part_s <= most) continue;
      most = part_s;
      result = {label, number};
    }
    return result;
  }
};

// One queue of one rank, cut into columns.
struct Lane {
  std::vector<Cell> cells;
  double busy_share = 0;
};

// The number of a micro-batch behind the first letter of its cells, if all of it
// has room there.
void write_numbers(Lane& lane) {
  std::vector<Cell>& cells = lane.cells;
  for (std::size_t begin = 0, end = 0; begin < cells.size(); begin = end) {
    const std::size_t category = cells[begin].category();
    const auto micro_batch = cells[begin].micro_batch();
    end = begin + 1;
    while (end < cells.size() && !cells[end].is_idle() &&
           cells[end].category() == category &&
           cells[end].micro_batch() == micro_batch) {
      ++end;
    }
    const std::string& number = micro_batch.second;
    if (number.size() >= end - begin) continue;
    for (std::size_t i = 0; i < number.size(); ++i) {
      cells[begin + 1 + i].digit = number[i];
    }
  }
}

Lane make_lane(const RankTimeline& timeline, const std::string& queue,
               double step_s, double cell_s) {
  const auto columns = static_cast<int>(std::ceil(step_s / cell_s - 1e-6));
  Lane lane{std::vector<Cell>(static_cast<std::size_t>(columns)),
            queue_shares(timeline, queue, step_s).busy};
  for (const TimelineEvent& event : timeline.events) {
    if (event.queue != queue || !is_work(event)) continue;
    const std::size_t category = category_of(event);
    const std::string number = micro_batch_of(event);
    const int first = static_cast<int>(event.begin_s / cell_s);
    for (int i = std::max(first, 0); i < columns; ++i) {
      const double begin_s = std::max(event.begin_s, i * cell_s);
      const double end_s = std::min(event.end_s, (i + 1) * cell_s);
      if (begin_s >= event.end_s) break;
      Cell& cell = lane.cells[static_cast<std::size_t>(i)];
      const double seconds = std::max(end_s - begin_s, 0.0);
      cell.seconds[category] += seconds;
      if (number.empty()) continue;
      cell.parts[{category, event.label, number}] += seconds;
    }
  }
  write_numbers(lane);
  return lane;
}

bool is_small(const Cell& cell, double cell_s) {
  // A half, less the rounding of sums.
  return !cell.is_idle() && cell.busy_s() < 0.499999 * cell_s;
}

std::string letter_in_colour(const Category& category, char letter,
                             bool small) {
  return small ? fmt::format("\033[38;5;{}m{}{}", category.color, letter,
                             kNoColor)
               : fmt::format("\033[48;5;{};38;5;16m{}{}", category.color,
                             letter, kNoColor);
}

std::string cell_text(const Cell& cell, double cell_s, const TextStyle& style) {
  if (cell.is_idle()) return style.utf8 ? "\u00b7" : ".";
  const Category& category = kCategories[cell.category()];
  const bool small = is_small(cell, cell_s);
  const char letter = cell.digit != 0 ? cell.digit
                      : small ? static_cast<char>(std::tolower(category.letter))
                              : category.letter;
  if (!style.color) return std::string(1, letter);
  return letter_in_colour(category, letter, small);
}

std::string axis(const std::string& title, std::size_t label_width,
                 double step_s, int columns) {
  std::string line = fmt::format("{:<{}}", title, label_width);
  const double distance_s = axis_distance(step_s, std::max(columns / 10, 1));
  for (int i = 0; distance_s > 0; ++i) {
    const std::string mark = i == 0 ? "0" : seconds_text(i * distance_s);
    const auto column = label_width + static_cast<std::size_t>(std::lround(
                                          i * distance_s / step_s * columns));
    if (column + mark.size() > label_width + static_cast<std::size_t>(columns))
      break;
    line.resize(column, ' ');
    line += mark;
  }
  return line + "\n";
}

// The legend of the letters that the cells of a picture use.
std::string legend(const std::vector<Cell>& cells, double cell_s,
                   const TextStyle& style) {
  std::string text;
  for (std::size_t i = 0; i < kCategories.size(); ++i) {
    const bool is_used =
        std::any_of(cells.begin(), cells.end(),
                    [&](const Cell& cell) { return cell.seconds[i] > 0; });
    if (!is_used) continue;
    const Category& category = kCategories[i];
    text += style.color ? letter_in_colour(category, category.letter, false)
                        : std::string(1, category.letter);
    text += fmt::format(" {}  ", i < kOther ? kEventClasses[i].title : "other");
  }
  text += style.utf8 ? "\u00b7 idle\n" : ". idle\n";
  if (std::any_of(cells.begin(), cells.end(),
                  [](const Cell& cell) { return cell.digit != 0; })) {
    text += "Numbers are micro-batches.\n";
  }
  if (std::any_of(cells.begin(), cells.end(),
                  [&](const Cell& cell) { return is_small(cell, cell_s); })) {
    text += "A small letter: busy for less than half of its cell.\n";
  }
  return text +
         fmt::format(
             "A cell is {}. At the right: how much of the step is busy.\n",
             seconds_text(cell_s));
}

std::string title_of(const RankGroup& group) {
  return rank_list(group.ranks) + (group.ranks.size() > 1 ? " alike" : "");
}

// Room for queues and titles; the longest titles have a line of their own.
std::size_t label_columns(const StepView& view) {
  std::size_t longest = 8;
  for (const RankGroup& group : view.groups) {
    const std::size_t title = title_of(group).size();
    if (title <= 16) longest = std::max(longest, title);
    for (const std::string& queue : queue_names(group.timeline)) {
      longest = std::max(longest, queue.size());
    }
  }
  return std::min<std::size_t>(longest, 16) + 2;
}

}  // namespace

TextStyle terminal_style() {
  TextStyle style;
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  const char* no_color = std::getenv("NO_COLOR");
  style.color = obeys_escapes(STDOUT_FILENO) &&
                (no_color == nullptr || *no_color == '\0');
  winsize size{};
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
      size.ws_col > 0) {
    style.width = std::clamp<int>(size.ws_col, 40, 200);
  }
  // The environment's locale, without changing the program's.
  if (locale_t locale = newlocale(LC_CTYPE_MASK, "", nullptr)) {
    style.utf8 = std::string(nl_langinfo_l(CODESET, locale)) == "UTF-8";
    freelocale(locale);
  }
  return style;
}

std::string timeline_text(const std::vector<RankTimeline>& timelines,
                          const TextStyle& style) {
  SB_CHECK(style.width >= 40, "timeline: a width of ", style.width,
           " columns; give at least 40");
  const StepView view = last_step(timelines);
  if (!(view.step_s > 0)) return "The timeline is empty.\n";

  const std::size_t label_width = label_columns(view);
  const int columns =
      style.width - static_cast<int>(label_width) - kShareColumns;
  const double axis_s = std::max(style.axis_s, view.step_s);
  const double cell_s = axis_s / columns;
  std::vector<Cell> cells;
  std::string text;
  const std::size_t shown = std::min(view.groups.size(), style.max_groups);
  for (std::size_t g = 0; g < shown; ++g) {
    const RankGroup& group = view.groups[g];
    std::string title = title_of(group);
    if (title.size() >= label_width) {
      text += title + "\n";
      title.clear();
    }
    text += axis(title, label_width, axis_s, columns);
    for (const std::string& queue : queue_names(group.timeline)) {
      const Lane lane = make_lane(group.timeline, queue, view.step_s, cell_s);
      cells.insert(cells.end(), lane.cells.begin(), lane.cells.end());
      text += fmt::format("{:<{}.{}}", queue, label_width, label_width - 2);
      for (const Cell& cell : lane.cells) {
        text += cell_text(cell, cell_s, style);
      }
      text += std::string(static_cast<std::size_t>(columns) - lane.cells.size(),
                          ' ');
      text += fmt::format("{:>5.0f} %\n", 100 * lane.busy_share);
    }
  }
  const std::string hidden = hidden_text(view, shown);
  if (!hidden.empty()) text += hidden + "\n";
  return text + legend(cells, cell_s, style);
}

std::string seconds_text(double seconds) {
  const auto three_digits = [](double value, const char* unit) {
    const int decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    return fmt::format("{:.{}f} {}", value, decimals, unit);
  };
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-6) return three_digits(seconds * 1e9, "ns");
  if (seconds < 0.9995e-3) return three_digits(seconds * 1e6, "us");
  if (seconds < 0.9995) return three_digits(seconds * 1e3, "ms");
  return three_digits(seconds, "s");
}

}  // namespace shardbook::sim
