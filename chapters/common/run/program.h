#pragma once

// The shell of a chapter's program: everything that is the same in all of them.
//
//   ChapterRun chapter;
//   chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
//     DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
//     ddp::DdpStrategy strategy(options, setup, mesh.group("dp"));
//     run.train(options, strategy);
//   };
//   chapter.reference = [](const Options& options) {
//     return train_one_device(options);
//   };
//   return run_program(options, line, chapter);
//
// A chapter that starts ranks fills in `rank`; one that works on several
// devices from one process fills in `devices`. Where a run with real data also
// keeps virtual time, the function runs first in the `sim` world: this run on
// shapes predicts the time that the real one counts.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/worlds.h"

namespace shardbook {

/// One rank's training, from the first step to its part of the report.
class Run {
 public:
  virtual ~Run() = default;
  /// Trains, and gathers the ranks' counts and, on rank 0, the whole model,
  /// which --save and --logits then write. Collective.
  virtual void train(const Options& options, Strategy& strategy) = 0;
};

struct ChapterRun {
  /// Called on every rank.
  std::function<void(const Options& options, ProcessGroup& world, Run& run)>
      rank;
  /// Called once, in place of `rank`: one process that works on `devices`, the
  /// first of which is current. Each has num_threads() cores.
  std::function<void(const Options& options, const std::vector<Device>& devices,
                     Run& run)>
      devices;
  /// For `devices`: how many share this machine's cores; 0: --world-size.
  int cores_shared_by = 0;
  /// For `rank`: ranks of one class do the same on the same shapes, so the
  /// `sim` world runs one of each class.
  FoldClass fold_class = one_class;
  /// The same training on one device, with the given options.
  std::function<ReferenceRun(const Options& options)> reference;
  /// Adds more to the finished report; may be empty.
  std::function<void(Report& report)> add_to_report;
};

/// Starts the ranks (or devices), trains, compares with one device, prints the
/// report. Returns the program's exit status.
int run_program(const Options& options, const CommandLine& line,
                const ChapterRun& chapter);

/// The same without printing: for benchmarks and tests. The list of ranks is
/// empty where rank 0 is another process.
Report run_and_compare(const Options& options, const ChapterRun& chapter);

/// Does on shapes what a run does before its first step. Throws the Error of a
/// run that cannot begin.
void check_run(const Options& options, const ChapterRun& chapter);

}  // namespace shardbook
