#include "chapters/programs/sweep.h"

#include <fmt/format.h>

namespace shardbook {

double step_s(const Report& report) { return report.time.step_s; }

double exposed_s(const Report& report) { return report.time.exposed_comm_s; }

double exposed_share(const Report& report) {
  return report.time.exposed_comm_s / report.time.step_s;
}

double idle_share(const Report& report) { return report.time.idle_share; }

double sent_bytes(const Report& report) {
  return report.ranks.front().bytes.counted;
}

std::vector<pictures::Value> sweep(
    const std::function<std::string(double value)>& line,
    const std::vector<double>& values, const Column& column,
    double x_per_value) {
  std::vector<pictures::Value> all;
  for (const double value : values) {
    all.push_back({x_per_value * value, column(run_once(line(value)))});
  }
  return all;
}

std::vector<pictures::Value> sweep(const std::string& line,
                                   const std::string& option,
                                   const std::vector<double>& values,
                                   const Column& column, double x_per_value) {
  return sweep(
      [&](double value) {
        return fmt::format("{} {} {:.15g}", line, option, value);
      },
      values, column, x_per_value);
}

}  // namespace shardbook
