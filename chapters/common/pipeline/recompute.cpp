#include "chapters/common/pipeline/recompute.h"

#include "core/check.h"

namespace shardbook::pipeline {

Recompute recompute_from_name(const std::string& name) {
  if (name == "always") return Recompute::kAlways;
  if (name == "except_last") return Recompute::kExceptLast;
  if (name == "never") return Recompute::kNever;
  SB_FAIL("--recompute ", name, ": give always, except_last or never");
}

void add_recompute(CommandLine& line, std::string& mode, bool& is_early) {
  line.add_mode("--recompute", &mode,
                "which micro-batches keep only their stage's input, and run "
                "forward again before their backward; except_last: not those "
                "whose backward is next",
                {"always", "except_last", "never"});
  line.add("--early-recompute", &is_early,
           "run forward again before the gradient arrives");
}

Recomputed::Recomputed(const Schedule& schedule, int rank, Recompute mode)
    : mode_(mode) {
  const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i + 1 < list.size(); ++i) {
    const Action &now = list[i], &next = list[i + 1];
    const bool is_backward = next.kind == ActionKind::kBackward ||
                             next.kind == ActionKind::kBackwardInput;
    if (now.kind == ActionKind::kForward && is_backward &&
        next.micro_batch == now.micro_batch && next.chunk == now.chunk) {
      backward_is_next_.emplace(now.micro_batch, now.chunk);
    }
  }
}

bool Recomputed::contains(int micro_batch, int chunk) const {
  if (mode_ == Recompute::kNever) return false;
  return mode_ == Recompute::kAlways ||
         backward_is_next_.count({micro_batch, chunk}) == 0;
}

}  // namespace shardbook::pipeline
