// The chapter's own options.

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/partition.h"

namespace shardbook::pipeline {

void add_options(CommandLine& line, StrategyOptions& setup) {
  std::string names;
  for (const std::string& name : schedules::schedule_names()) {
    names += name + ", ";
  }
  line.add({"--schedule",
            "schedules that flush compute the same sums, and others have no "
            "checkpoints"},
           &setup.schedule, names + "or FILE.json");
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "pieces of a batch, all but the last equally large; not for "
           "pipedream, which does not cut batches",
           1, 1 << 20);
  line.add({"--chunks", may_differ::kPlace}, &setup.chunks,
           "interleaved: stages per rank", 2);
  line.add({"--memory-limit", may_differ::kPlace}, &setup.memory_limit,
           "zb-auto: sets of activations that a rank may keep; 0: twice the "
           "number of ranks");
  line.add({"--replicas", "pipedream has no checkpoints"}, &setup.replicas,
           "pipedream: ranks of each stage (2,1)");
  line.add({"--partition", may_differ::kPlace}, &setup.partition,
           kPartitionHelp);
  add_recompute(line, setup.recompute, setup.early_recompute);
  line.add({"--stash", "pipedream has no checkpoints"}, &setup.stash,
           "pipedream: backward reads the weights that its forward read");
  line.add({"--vertical-sync", "pipedream has no checkpoints"},
           &setup.vertical_sync,
           "pipedream: a mini-batch reads the same version at every stage");
  line.add({"--post-validation", may_differ::kPlace}, &setup.post_validation,
           "1f1b, zb-h1, zb-h2: step before the norm of all gradients is "
           "known, and redo the step if it was wrong");
  line.refuse("--balance", "this option is called --partition");
  line.refuse("--group",
              "chunks take turns after as many micro-batches as ranks");
  line.add({"--print-schedule", may_differ::kOutput}, &setup.print_schedule,
           "draw the schedule, print its idle time and memory, and exit");
  line.add({"--write-schedule", may_differ::kOutput}, &setup.write_schedule,
           "write the schedule to FILE.json, which --schedule reads, and exit");
  line.after_parse([&line, &setup] {
    for (const auto& [flag, value] : line.given()) setup.given.push_back(flag);
  });
}

}  // namespace shardbook::pipeline
