#pragma once

// Pieces of report.html.

#include <cstddef>
#include <string>

#include "chapters/table/run.h"

namespace shardbook::table::internal {

/// The page with its style and script, and marks where text goes.
std::string page_template();

/// Timeline, memory over time and bytes by link; empty without virtual time.
std::string pictures_html(std::size_t run_number, const ProgramRun& run);

/// Predicted and counted, per rank; ranks with the same bill share rows.
std::string bills_html(const ProgramRun& run);

}  // namespace shardbook::table::internal
