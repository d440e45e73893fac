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
  line.add("--schedule", &setup.schedule, names + "or FILE.json")
      .may_differ(
          "schedules that flush compute the same sums, and others have no "
          "checkpoints");
  line.add("--micro-batches", &setup.micro_batches,
           "pieces of a batch, all but the last equally large; not for "
           "pipedream, which does not cut batches",
           1, 1 << 20)
      .may_differ(may_differ::kSums);
  line.add("--chunks", &setup.chunks, "interleaved: stages per rank", 2)
      .may_differ(may_differ::kPlace);
  line.add("--memory-limit", &setup.memory_limit,
           "zb-auto: sets of activations that a rank may keep; 0: twice the "
           "number of ranks")
      .may_differ(may_differ::kPlace);
  line.add("--replicas", &setup.replicas,
           "pipedream: ranks of each stage (2,1)")
      .may_differ("pipedream has no checkpoints");
  line.add("--partition", &setup.partition, kPartitionHelp)
      .may_differ(may_differ::kPlace);
  add_recompute(line, setup.recompute, setup.early_recompute);
  line.add("--stash", &setup.stash,
           "pipedream: backward reads the weights that its forward read")
      .may_differ("pipedream has no checkpoints");
  line.add("--vertical-sync", &setup.vertical_sync,
           "pipedream: a mini-batch reads the same version at every stage")
      .may_differ("pipedream has no checkpoints");
  line.add("--post-validation", &setup.post_validation,
           "1f1b, zb-h1, zb-h2: step before the norm of all gradients is "
           "known, and redo the step if it was wrong")
      .may_differ(may_differ::kPlace);
  line.refuse("--balance", "this option is called --partition");
  line.refuse("--group",
              "chunks take turns after as many micro-batches as ranks");
  line.add("--print-schedule", &setup.print_schedule,
           "draw the schedule, print its idle time and memory, and exit")
      .may_differ(may_differ::kOutput);
  line.add("--write-schedule", &setup.write_schedule,
           "write the schedule to FILE.json, which --schedule reads, and exit")
      .may_differ(may_differ::kOutput);
  line.after_parse([&line, &setup] {
    for (const auto& [flag, value] : line.given()) setup.given.push_back(flag);
  });
}

}  // namespace shardbook::pipeline
