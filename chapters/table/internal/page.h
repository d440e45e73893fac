#pragma once

// Pieces of report.html.

#include <cstddef>
#include <string>
#include <vector>

#include "chapters/table/run.h"
#include "chapters/table/run_set.h"

namespace shardbook::table::internal {

/// The page, with marks where style, script and text go.
std::string page_template();
std::string page_style();
std::string page_script();

/// A sign, and a word for screen readers, by default the verdict's.
std::string sign_html(Verdict verdict, const char* word = nullptr);

/// The name of a run as a link to its section.
std::string link_to(std::size_t run_number, const ProgramRun& run);

/// The runs that trained: a table of their claims.
std::string proof_html(const std::vector<ProgramRun>& runs);
/// The simulated runs: per group a table with bars, and step time against
/// memory.
std::string buys_html(const std::vector<ProgramRun>& runs);
/// Step time against memory; empty for fewer than two points.
std::string scatter_html(const RunGroup& group,
                         const std::vector<ProgramRun>& runs);
/// The runs of ./shardbook compare: a table, and their timelines on one axis.
std::string compared_html(const std::vector<ProgramRun>& runs);
/// Several sets of runs, line by line.
std::string comparison_html(const std::vector<ProgramRun>& runs);

/// The glossary of the page.
std::string glossary_html();

/// The section of one run; closed, it shows only its first line.
std::string run_html(std::size_t run_number, const ProgramRun& run,
                     bool is_open);

/// Timeline, memory over time and bytes by link; empty without virtual time.
std::string pictures_html(std::size_t run_number, const ProgramRun& run);

/// Draws the times of one device, the naive schedule and the best split size as
/// bars with their deviations, and a curve over the split sizes: once in wall
/// time and once in virtual time.
std::string sweep_html(const Sweep& sweep);

/// Predicted and counted, per rank; ranks with the same bill share rows.
std::string bills_html(const ProgramRun& run);

}  // namespace shardbook::table::internal
