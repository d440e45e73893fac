#include <fmt/format.h>

#include <algorithm>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"
#include "core/how_many.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

namespace svg = pictures::svg;

/// One of the two clocks.
struct Clock {
  std::string title, note;
  double SweepTime::*seconds;
  bool has_deviation;
};

double deviation(const Clock& clock, const SweepTime& time) {
  return clock.has_deviation ? time.wall_sd_s : 0;
}

std::string time_text(const Clock& clock, const SweepTime& time) {
  const std::string mean = sim::seconds_text(time.*clock.seconds);
  return clock.has_deviation ? fmt::format("{} \u00b1 {}", mean,
                                           sim::seconds_text(time.wall_sd_s))
                             : mean;
}

std::string bars_html(const Sweep& sweep, const Clock& clock,
                      const SweepTime& best) {
  const std::vector<std::pair<std::string, const SweepTime*>> bars = {
      {"one device", &sweep.single},
      {"naive", &sweep.naive},
      {fmt::format("splits of {}", best.split_size), &best}};
  double most = 0;
  for (const auto& [name, time] : bars) {
    most = std::max(most, time->*clock.seconds + deviation(clock, *time));
  }
  std::string text = "<div class=\"bars wide\">";
  for (const auto& [name, time] : bars) {
    const double seconds = time->*clock.seconds;
    const double sd = deviation(clock, *time);
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        name,
        most > 0 ? svg::bar_with_error(seconds / most, sd / most, "time")
                 : svg::bar(0, "time"),
        time_text(clock, *time));
  }
  return text + "</div>\n";
}

std::string curve_html(const Sweep& sweep, const Clock& clock) {
  double most =
      std::max(sweep.single.*clock.seconds, sweep.naive.*clock.seconds);
  std::vector<svg::Point> points;
  for (const SweepTime& time : sweep.pipelined) {
    most = std::max(most, time.*clock.seconds + deviation(clock, time));
  }
  std::string words, axis;
  const auto count = static_cast<double>(sweep.pipelined.size());
  for (std::size_t i = 0; i < sweep.pipelined.size(); ++i) {
    const SweepTime& time = sweep.pipelined[i];
    const double x = (static_cast<double>(i) + 0.5) / count;
    points.push_back(
        {x, time.*clock.seconds / most, deviation(clock, time) / most});
    words += fmt::format("{}splits of {}: {}", i == 0 ? "" : "; ",
                         time.split_size, time_text(clock, time));
    axis += fmt::format("<span style=\"left:{:.2f}%\">{}</span>", 100 * x,
                        time.split_size);
  }
  return fmt::format(
      "<div class=\"plot\"><b>by split size; lines: one device (solid), "
      "naive (dashed)</b><div class=\"scale\" aria-hidden=\"true\">"
      "<span>{}</span><span>0</span></div>{}"
      "<div class=\"axis\" aria-hidden=\"true\">{}</div></div>\n",
      sim::seconds_text(most),
      svg::curve(points, sweep.single.*clock.seconds / most,
                 sweep.naive.*clock.seconds / most, words),
      axis);
}

std::string clock_html(const Sweep& sweep, const Clock& clock) {
  const SweepTime& best =
      *std::min_element(sweep.pipelined.begin(), sweep.pipelined.end(),
                        [&](const SweepTime& a, const SweepTime& b) {
                          return a.*clock.seconds < b.*clock.seconds;
                        });
  if (sweep.single.*clock.seconds <= 0) return "";
  return fmt::format(
             "<figure class=\"sweep\"><figcaption><b>{}</b> {}</figcaption>\n",
             clock.title, svg::escape(clock.note)) +
         bars_html(sweep, clock, best) + curve_html(sweep, clock) +
         "</figure>\n";
}

}  // namespace

std::string sweep_html(const Sweep& sweep) {
  return clock_html(sweep, {"Split sizes",
                            fmt::format("wall time of a step on this "
                                        "machine, {}, one standard "
                                        "deviation",
                                        how_many(sweep.repeats, "repeat")),
                            &SweepTime::wall_s, true}) +
         clock_html(sweep, {"Split sizes",
                            "virtual time of a step on " + sweep.cluster,
                            &SweepTime::virtual_s, false});
}

}  // namespace shardbook::table::internal
