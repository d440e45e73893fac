#pragma once

// The output of cells: tensors, pictures and tables.
//
//   xcpp::display(x);                              // a tensor
//   xcpp::display(timeline(report.timelines));     // a picture
//
// `xcpp::display` asks a value for its `mime_bundle_repr`. Every value has a
// text as well: for readers without pictures, and for `./shardbook notebook
// --execute`, which compares texts.
//
// Pictures are SVG with their own colours, drawn by the code that draws
// report.html (chapters/common/pictures).

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "chapters/11_dtensor/picture.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/run/report.h"
#include "comm/device_mesh.h"
#include "comm/ledger.h"
#include "core/tensor.h"
#include "sim/timeline.h"

/// The name that xeus has for it.
namespace nl = nlohmann;

namespace shardbook::notebook {

// A cell may have one using declaration, and this one gives it both namespaces.
using namespace shardbook;

/// A text, and the same as SVG or HTML (empty: the text alone).
struct Picture {
  std::string text = "";
  std::string svg = "";
  std::string html = "";
};
nl::json mime_bundle_repr(const Picture& picture);

// --- Runs ------------------------------------------------------------------

/// The last step: what each rank does, from left to right. Ranks that do the
/// same share their lanes.
Picture timeline(const std::vector<sim::RankTimeline>& timelines,
                 int max_groups = 8);
/// The memory in use during the last step, by kind, without the scratch memory
/// of kernels. The text has the peaks.
Picture memory(const std::vector<sim::RankTimeline>& timelines,
               int max_groups = 4);
/// The claims of a run: numbers, bytes, memory and virtual time, each predicted
/// and counted. No wall time.
Picture claims(const Report& report);
/// Calls of one rank, in order; calls that repeat are one line.
Picture ledger(const std::vector<CommRecord>& records);

// --- Layouts ---------------------------------------------------------------

/// Which rank sits where on the grid of named axes.
Picture mesh(const Topology& topology);
/// Which ranks hold which blocks (chapters/11_dtensor/picture.h).
Picture holders(const std::vector<dtensor::Held>& all);
/// A schedule of a pipeline, drawn in the time of `replay`.
Picture schedule(const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay);

// --- Numbers ---------------------------------------------------------------

/// Rows of equal length; the first one has the titles.
Picture table(const std::vector<std::vector<std::string>>& rows);

/// Values of one curve, a step apart.
struct Series {
  std::string name = "";
  std::vector<double> values = {};
};
/// Curves over steps in one frame. The text has the first and the last values.
Picture curves(const std::vector<Series>& series);

struct Bar {
  std::string name = "";
  double value = 0;
  double deviation = 0;   ///< drawn to both sides of the bar's end
  std::string text = "";  ///< the value with its unit
};
/// Horizontal bars, the longest as wide as the picture.
Picture bars(const std::vector<Bar>& all);

/// A curve through these values with their deviations, their names below it,
/// and two values to compare with as lines across.
Picture curve(const std::vector<Bar>& points, const Bar& solid,
              const Bar& dashed);

/// printf's "%.*f".
std::string fixed(double value, int digits);

/// "exercise 1: right" or "exercise 1: not yet", as a line: for the cell that
/// checks a reader's answer.
std::string verdict(const std::string& exercise, bool is_right);
/// The same for a number, which may differ from the right one by rounding.
std::string verdict(const std::string& exercise, double answer, double right);

}  // namespace shardbook::notebook

// What argument-dependent lookup finds.
namespace shardbook {
/// Shape, dtype, device, and the values as a table (corners of a large one).
nl::json mime_bundle_repr(const Tensor& x);
nl::json mime_bundle_repr(const Topology& topology);
nl::json mime_bundle_repr(const DeviceMesh& mesh);
nl::json mime_bundle_repr(const Report& report);
namespace dtensor {
nl::json mime_bundle_repr(const Held& held);
}
}  // namespace shardbook
