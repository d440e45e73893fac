#pragma once

// Published plans beside the planner's: the rows of Megatron-LM's table 1,
// Llama 3's table 4 and MPT, each with the predicted cost of both.
//
// A system of its time did not have all choices. The planner is asked twice:
// with the choices that the system had, and with all of this book's on the same
// machine and with the same kernels.

#include <string>
#include <vector>

#include "chapters/planner/search.h"

namespace shardbook::bench {

struct PublishedRow {
  std::string model;
  planner::PlanRequest request;  ///< limited to the choices of its system
  planner::PlanRequest open;     ///< with all of this book's
  planner::Plan plan;            ///< the one that was published
};

struct Compared {
  std::string model;
  planner::Prediction published;
  planner::Prediction within;  ///< the best of the choices that it had
  /// The best of this book's; no seconds where nobody asked.
  planner::Prediction open;
  /// Where our memory model has no room for the published plan, the planner
  /// gets as much as that plan needs.
  double memory_bytes = 0;

  /// How much slower the published plan is predicted to be.
  double slower() const {
    return published.step.seconds / within.step.seconds - 1;
  }
};

/// The tables in `folder` (bench/validate). Throws Error where one is missing.
std::vector<PublishedRow> megatron_rows(const std::string& folder);
std::vector<PublishedRow> llama3_rows(const std::string& folder);
/// The rows of A100s with 80 GB.
std::vector<PublishedRow> mpt_rows(const std::string& folder);

/// With the choices that its system had: all but `open`.
Compared compare_within(const PublishedRow& row);
Compared compare(const PublishedRow& row);
/// A table of text.
std::string compared_text(const std::vector<Compared>& rows);

}  // namespace shardbook::bench
