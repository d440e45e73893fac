#pragma once

// Published plans against the planner's: the rows of Megatron-LM's table 1,
// Llama 3's table 4 and MPT, each with the predicted cost of both.
//
// Systems of that time lacked some choices. So the planner searches twice:
// among the system's choices, and among all of this book's, on the same machine
// with the same kernels.

#include <string>
#include <vector>

#include "chapters/planner/search.h"

namespace shardbook::bench {

struct PublishedRow {
  std::string model;
  planner::PlanRequest request;  ///< limited to the choices of its system
  planner::PlanRequest open;     ///< with all of this book's
  planner::Plan plan;            ///< the published plan
};

struct Compared {
  planner::Prediction published;
  planner::Prediction within;  ///< the best of its system's choices
  /// The best of this book's choices; no seconds where not searched.
  planner::Prediction open;
  /// Where the published plan exceeds the memory of our model, the planner gets
  /// as much as that plan needs.
  double memory_bytes = 0;

  /// How much slower the published plan is predicted to be.
  double slower() const {
    return published.step.seconds / within.step.seconds - 1;
  }
};

/// The tables of bench/validate.
std::vector<PublishedRow> megatron_rows();
std::vector<PublishedRow> llama3_rows();
/// The rows of A100s with 80 GB.
std::vector<PublishedRow> mpt_rows();

/// Searches its system's choices, and all of this book's where `asks_open`.
Compared compare(const PublishedRow& row, bool asks_open);

}  // namespace shardbook::bench
