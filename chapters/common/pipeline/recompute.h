#pragma once

// Recomputation: which micro-batches keep only their stage's input.
//
// A stage that drops what its forward computed keeps the input, and runs the
// forward again before the backward. Recomputation saves memory only if other
// micro-batches come in between: a micro-batch whose backward directly follows
// its forward would drop its graph and build the same one again.
//
//   GPipe    F0 F1 F2 B2 B1 B0     all but the last micro-batch
//   1F1B     F0 B0 F1 B1 F2 B2     nothing on the last stage
//            F0 F1 B0 F2 B1 B2     all on the stages before
//
// Chen et al. 2016; Huang et al. 2019, section 2.3; torchgpipe's `checkpoint`.

#include <set>
#include <string>
#include <utility>

#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/run/options.h"

namespace shardbook::pipeline {

enum class Recompute {
  kAlways,
  /// All micro-batches but those whose backward directly follows on their rank.
  kExceptLast,
  kNever
};
/// "always", "except_last", "never"; throws Error for others.
Recompute recompute_from_name(const std::string& name);
/// --recompute and --early-recompute.
void add_recompute(CommandLine& line, std::string& mode, bool& is_early);

/// The forwards of one rank whose graphs are dropped. Copies what it needs.
class Recomputed {
 public:
  Recomputed(const Schedule& schedule, int rank, Recompute mode);
  /// `micro_batch` is one of those in the schedule's lists.
  bool contains(int micro_batch, int chunk) const;

 private:
  Recompute mode_;
  /// Micro-batch and chunk of forwards whose backward is next.
  std::set<std::pair<int, int>> backward_is_next_;
};

}  // namespace shardbook::pipeline
