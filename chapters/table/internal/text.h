#pragma once

// What the tables of a terminal share.

#include <string>
#include <vector>

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

/// What the groups show, under a title each. The overview has its own rows
/// only, and titles of one line.
std::string buys_table(const std::vector<RunGroup>& groups, const Marks& marks,
                       bool is_overview);

}  // namespace shardbook::table::internal
