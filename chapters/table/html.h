#pragma once

// report.html: several program runs in one file that needs no network. The
// first screen says how the claims stand, and shows step time against memory of
// one group and a few timelines on one axis. Tables of all runs follow: what
// they buy, and the proof. Each run has a section with its claims and the
// predicted and counted values per rank. A run with virtual time also has the
// timeline of its last step, memory over time, and bytes by link.
//
// Tables and bars need no script. Timelines are compressed data: a script draws
// those of a run when the run is opened, zooms into them, and describes the item
// under the pointer or the arrow keys.

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// Folders, as links of the page name them.
struct ReportLinks {
  std::string book = "";      ///< a clone of the book; empty: no links into it
  std::string explorer = "";  ///< the explorer's; empty: it has not been built
};

/// The whole page, with remarks on the runs at its top. The same runs give the
/// same bytes.
std::string report_html(const Runs& runs, const std::string& remarks = "",
                        const ReportLinks& links = {});

}  // namespace shardbook::table
