#pragma once

// The output of cells: tensors, pictures and tables.
//
//   xcpp::display(x);                                // a tensor
//   xcpp::display(timeline("All ranks compute", report.timelines));
//
// `xcpp::display` asks a value for its `mime_bundle_repr`. Every value has a
// text as well: for readers without pictures, and for `./shardbook notebook
// --execute`, which compares texts.
//
// Pictures are SVG with their own colours, drawn in chapters/pictures like
// those of report.html. The first argument of each is its title, which says what
// one sees. Every picture is an image of HTML, too, with a text for readers that
// do not see it: nbconvert 6 empties each SVG, and 7 drops its text.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/common/run/report.h"
#include "chapters/pictures/layouts.h"
#include "chapters/pictures/plot.h"
#include "chapters/pictures/timeline_picture.h"
#include "comm/ledger.h"
#include "comm/topology.h"
#include "core/tensor.h"

/// The name that xeus uses for it.
namespace nl = nlohmann;

namespace shardbook::notebook {

// A cell may have one using declaration, and this one gives it both namespaces.
using namespace shardbook;

using pictures::Bar;
using pictures::bars;
using pictures::curve;
using pictures::curves;
using pictures::memories;
using pictures::memory;
using pictures::mesh;
using pictures::NamedSchedule;
using pictures::NamedTimelines;
using pictures::Picture;
using pictures::schedule;
using pictures::schedules;
using pictures::Series;
using pictures::timeline;
using pictures::timelines;

/// The claims of a run: numbers, bytes, memory and virtual time, each predicted
/// and counted. No wall time.
Picture claims(const Report& report);
/// Calls of one rank, in order; calls that repeat are one line.
Picture ledger(const std::vector<CommRecord>& records);

/// Which ranks hold which blocks (chapters/11_dtensor/placement_picture.h).
Picture holders(const std::string& title,
                const std::vector<dtensor::Held>& all);

/// Rows of equal length; the first one has the titles.
Picture table(const std::vector<std::vector<std::string>>& rows);

/// printf's "%.*f".
std::string fixed(double value, int digits);

/// "exercise 1: right" or "exercise 1: not yet", as a line: for the cell that
/// checks a reader's answer.
std::string verdict(const std::string& exercise, bool is_right);
/// The same for a number, which may differ from the right one by rounding.
std::string verdict(const std::string& exercise, double answer, double right);

}  // namespace shardbook::notebook

// Found by argument-dependent lookup.
namespace shardbook {
namespace pictures {
nl::json mime_bundle_repr(const Picture& picture);
}
/// Shape, dtype, device, and the values as a table (corners of a large one).
nl::json mime_bundle_repr(const Tensor& x);
nl::json mime_bundle_repr(const Topology& topology);
nl::json mime_bundle_repr(const Report& report);
}  // namespace shardbook
