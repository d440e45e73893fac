#pragma once

// report.html: several program runs in one file that needs no network. It
// opens with a comparison of the runs. Each run has a section with its claims
// and the predicted and counted values per rank. A run with virtual time also
// has the timeline of its last step, memory over time, and bytes by link.
//
// The drawings are static (svg.h) and print as they are. A script, given the
// timelines as data, describes the item under the pointer or the arrow keys,
// and switches between light and dark.

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// The whole page, with remarks on the runs at its top. The same runs give the
/// same bytes.
std::string report_html(const std::vector<ProgramRun>& runs,
                        const std::string& remarks = "");

}  // namespace shardbook::table
