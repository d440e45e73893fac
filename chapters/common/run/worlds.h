#pragma once

// A chapter's ranks in the world that the options name.
//
//   const ChapterBody body = [&](const Options& options, ProcessGroup& world,
//                                Report& report) {
//     DdpStrategy strategy(options, setup, world);
//     const TrainingLog log = train(options, ...);
//     finish_rank(options, world, log, bill, report);
//   };
//   Report report = run_chapter(options, body);
//
// Where a run with real data also keeps virtual time, the same body runs first
// in the `sim` world, on shapes alone: it simulates peaks of memory and the
// time of a step before the real run begins. The chapter's code cannot tell the
// two apart. On GPUs the run on shapes predicts wall time, as accurately as
// --cluster describes the machine.

#include <functional>
#include <memory>

#include "chapters/common/run/report.h"
#include "chapters/common/run/training.h"
#include "comm/process_group.h"
#include "core/device.h"
#include "sim/cost_model.h"
#include "sim/virtual_clock.h"

namespace shardbook {

using ChapterBody = std::function<void(const Options& options,
                                       ProcessGroup& world, Report& report)>;
/// Ranks of one class do the same on the same shapes.
using FoldClass = std::function<int(int rank)>;

/// All ranks do the same.
inline int one_class(int) { return 0; }
/// Every rank does something else, so each is run.
inline int each_rank(int rank) { return rank; }

/// A preset or a file. Errors begin with "--cluster NAME: ".
sim::Cluster read_cluster(const std::string& name);
/// Costs on --cluster; null for "none".
std::shared_ptr<const sim::CostModel> cost_model(const WorldOptions& options);

/// Device i of one process, by --device and --device-memory; for shapes only
/// with `on_shapes`. Devices share GPUs where there are fewer of them.
Device make_device(const WorldOptions& options, int i, bool on_shapes = false);

/// The same run on shapes, of a few steps, which prints and writes nothing. It
/// keeps --log: its norms are computed, and cost time.
Options on_shapes(const Options& options);

/// Throws Error where --cluster has fewer devices than --world-size.
void check_world_size(const WorldOptions& options);

/// Runs `body` on every rank and returns rank 0's report; its list of ranks is
/// empty where rank 0 is another process. The `sim` world runs one rank of each
/// `fold_class`.
Report run_chapter(const Options& options, const ChapterBody& body,
                   const FoldClass& fold_class = one_class);

/// For chapters that start no ranks: calls `run` with the options, and where
/// real data also keeps virtual time, once before with the options of the
/// prediction (backend "sim", few steps, nothing written).
Report with_prediction(
    const Options& options,
    const std::function<void(const Options& options, Report& report)>& run);

/// Compares with a training on one device (`train_one`, with the given
/// options), except under --no-check and in the `sim` world, which has no
/// numbers. One device computes with as many cores as a rank did. Both then add
/// up in the same order, which matters to batch norms of few images: they
/// amplify the rounding of their sums. With --device cuda the one device is a
/// GPU as well: the same kernels, so parity.h holds for it as it is.
void compare_with_reference(
    const Options& options, const std::vector<NamedTensor>& trained,
    const std::function<ReferenceRun(const Options& options)>& train_one,
    Report& report);

/// Gathers the ranks' counts. Collective; `report` is filled on rank 0, whose
/// bill has the virtual time of all ranks.
void finish_rank(const Options& options, ProcessGroup& world,
                 const TrainingLog& log, const Bill& bill, Report& report);

/// Fills in the losses, the wall time, and the virtual time of report.ranks:
/// `clock` is null where none is kept. For the rank that reports.
void note_training(const Options& options, const TrainingLog& log,
                   const sim::VirtualClock* clock, const Bill& bill,
                   Report& report);

/// Writes --timeline, or prints it.
void show_timeline(const OutputOptions& options, const Report& report);

}  // namespace shardbook
