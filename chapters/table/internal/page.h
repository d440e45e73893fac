#pragma once

// Pieces of report.html.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/svg.h"
#include "chapters/pictures/units.h"
#include "chapters/table/run.h"

namespace shardbook::table::internal {

namespace svg = pictures::svg;
using pictures::Unit;
using svg::escape;

/// The page, with marks where style, script and text go.
std::string page_template();
std::string page_style();
std::string page_words();
std::string page_script();

/// A sign, and a word for screen readers, by default the verdict's.
std::string sign_html(Verdict verdict, const char* word = nullptr);

/// Runs are numbered by their place in the list, which `run` is part of.
std::size_t number_of(const ProgramRun& run, const Runs& runs);
/// Whether several sets of runs are compared.
bool are_sets(const Runs& runs);
/// Says what the run is: "DDP, sim x4", and of which set.
std::string full_name(const ProgramRun& run, const Runs& runs);
/// A link to the section of a run, with its short name, or its full one.
std::string link_to(const ProgramRun& run, const Runs& runs,
                    bool is_full = false);

/// A note on the * behind names; empty where there is none.
std::string other_trainings_html(const Chosen& runs);

// ---- Tables

/// A unit for all numbers of a column: the largest in which the smallest positive
/// value is at least 1. `choose` is pictures::seconds_unit or bytes_unit.
Unit unit_of(Unit (*choose)(double), const Chosen& runs,
             double (*value)(const ProgramRun& run));
/// Three digits, or all before the point; a dash for negative values.
std::string number_text(double value, const Unit& unit);

/// The head of a column: a word of the glossary, which defines it, and a unit.
struct Head {
  std::string word;
  std::string unit = "";
};
/// A table that scrolls where it is too wide, open for its rows.
std::string open_table(const std::string& name, const std::vector<Head>& heads);
constexpr const char* kCloseTable = "</tbody></table></div>\n";

/// Swatches with titles, behind a word.
std::string legend_html(
    const std::vector<std::pair<std::string, std::string>>& classes,
    const std::string& word = "");

// ---- The first screen

/// The first screen shows the scatter of one group, and a few of its timelines.
struct FirstLook {
  std::string scatter_group;  ///< its id; empty: none
  std::string html;
};
FirstLook first_look(const Runs& runs);

// ---- The sections. An id and a title of each that the contents list.

/// "Split the batch", or the setting of runs without a title.
std::string title_of(const RunGroup& group);
/// The id of the group's section.
std::string id_of(const RunGroup& group, const Runs& runs);

/// The simulated runs: per group a table with bars, and step time against
/// memory, except the group whose scatter is on the first screen.
std::string buys_html(const Runs& runs, const std::string& scatter_group);
/// The runs that trained: one line, which opens a table of their claims. It is
/// open if a claim failed.
std::string proof_html(const Runs& runs);
/// The runs of ./shardbook compare, in place of these two.
std::string compared_html(const Runs& runs);
/// Several sets of runs, line by line.
std::string comparison_html(const Runs& runs);

/// The section of one run; closed, it shows only its first line. It links to its
/// chapter in the folder `book`.
std::string run_html(const ProgramRun& run, const Runs& runs, bool is_open,
                     const std::string& book);

// ---- Pictures of a run

/// What a run's element of data holds: its timeline for the script.
std::string timeline_data(const sim::StepView& view);

/// Whether a run has a timeline that can be drawn.
bool has_timeline(const ProgramRun& run);

/// The timelines of some runs under each other, on one axis of time. `title`
/// says what one sees.
std::string timelines_html(const std::string& title, const Chosen& drawn,
                           const Runs& runs);

/// Timeline, memory over time and bytes by link; empty without virtual time.
std::string pictures_html(const ProgramRun& run, const Runs& runs);

}  // namespace shardbook::table::internal
