#pragma once

// The shell of a chapter's program: everything that is the same in all of them.
//
//   Program program(CommandLine& line) {
//     auto& options = line.own<Options>();
//     auto& setup = line.own<ddp::StrategyOptions>();
//     line.describe("ch02_ddp", "DistributedDataParallel.");
//     add_shared_options(line, options);
//     ddp::add_options(line, setup);
//     line.parse();
//     check_options(options);
//     ChapterRun chapter;
//     chapter.rank = [&setup](const Options& options, ProcessGroup& world,
//                             Run& run) {
//       DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
//       ddp::DdpStrategy strategy(options, setup, mesh.group("dp"));
//       run.train(options, strategy);
//     };
//     chapter.reference = [](const Options& options) {
//       return train_one_device(options);
//     };
//     return {options, chapter};
//   }
//   int main(int argc, char** argv) {
//     return program_main(program, argc, argv);
//   }
//
// A chapter that starts ranks fills in `rank`; one that works on several
// devices from one process fills in `devices`. Where a run with real data also
// keeps virtual time, the function runs first in the `sim` world: this run on
// shapes predicts the time that the real one counts.

#include <functional>
#include <memory>
#include <string>
#include <utility>
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

/// What a line asks of a program.
struct Program {
  Options options;
  ChapterRun chapter;
  /// In place of training: prints something else, and returns the exit status.
  std::function<int()> instead = {};
};

inline Program instead_of_training(std::function<int()> instead) {
  return {{}, {}, std::move(instead)};
}

/// A chapter's program: adds its options to a line, reads the line, and says how
/// its ranks train. What it returns lives no longer than the line.
using MakeProgram = std::function<Program(CommandLine& line)>;

/// main() of a program: starts the ranks (or devices), trains, compares with one
/// device, prints the report. Returns the exit status.
int program_main(const MakeProgram& program, int argc, char** argv);

/// The report of a program's line, "NAME OPTIONS", which is not printed. Words end
/// at blanks; 'single quotes' hold blanks together. Ranks are threads or fibers of
/// this process; throws Error for other backends, for options of what is printed,
/// and for what the program would refuse.
Report run_line(const MakeProgram& program, const std::string& line);

/// The same for options that no line gave: for benchmarks and tests. The list of
/// ranks is empty where rank 0 is another process.
Report run_and_compare(const Options& options, const ChapterRun& chapter);

/// Does on shapes what a run does before its first step. Throws the Error of a
/// run that cannot begin.
void check_run(const Options& options, const ChapterRun& chapter);

}  // namespace shardbook
