#pragma once

// Runs of a chapter's line that differ in one option, as points of a curve.
//
//   plot.curve(sweep("05_gpipe --world-size 4", "--micro-batches", {1, 2, 4},
//                    step_s), kBlue);

#include <functional>
#include <string>
#include <vector>

#include "chapters/pictures/plot.h"
#include "chapters/programs/programs.h"

namespace shardbook {

/// A number of a report.
using Column = std::function<double(const Report&)>;

/// The virtual times of a step.
double step_s(const Report& report);
double exposed_s(const Report& report);
/// Of the step's time.
double exposed_share(const Report& report);
double idle_share(const Report& report);
/// By rank 0 in the whole run.
double sent_bytes(const Report& report);

/// run_once(line) with each value of the option: the value, or `x_per_value` times as
/// much, and the column. The value of an option that a line has already is
/// replaced.
std::vector<pictures::Value> sweep(const std::string& line,
                                   const std::string& option,
                                   const std::vector<double>& values,
                                   const Column& column,
                                   double x_per_value = 1);
/// The same where the values change more than one option.
std::vector<pictures::Value> sweep(
    const std::function<std::string(double value)>& line,
    const std::vector<double>& values, const Column& column,
    double x_per_value = 1);

}  // namespace shardbook
