#pragma once

// What the tables of a terminal share.

#include <string>
#include <vector>

#include "chapters/pictures/text_table.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"

namespace shardbook::table::internal {

/// The marks that a terminal can show.
struct Marks {
  std::string passed, failed;
  std::string too_large;  // behind memory that does not fit
  std::string times;      // between the backend and its ranks
};

Marks marks_of(Charset charset, bool has_colours);

/// Lines of a legend that say what the * behind names means; empty where there is
/// none.
template <typename Runs>
std::string other_trainings_lines(const Runs& runs) {
  const std::string text = other_trainings_text(runs);
  return text.empty() ? "" : pictures::text_table::wrap(text);
}

/// What the groups show, under a title each. The overview has its own rows
/// only, and titles of one line.
std::string buys_table(const std::vector<RunGroup>& groups, const Marks& marks,
                       bool is_overview);

}  // namespace shardbook::table::internal
