#pragma once

// Checkpoints: a run that was stopped, or killed, goes on where it was.
//
//   ch03_zero_fsdp --world-size 4 --checkpoint DIR --checkpoint-every 10
//   ch03_zero_fsdp --world-size 8 --checkpoint DIR --checkpoint-every 10 --resume
//
//   DIR/step-00000020/rank-00001-of-00004.safetensors    parts of rank 0
//                     ...
//                     manifest.json                      steps, ranks, the run
//   DIR/step-00000030/...                                the last two are kept
//   DIR/.step-00000040.tmp/...                           one that is being written
//
// A checkpoint is written under a temporary name, synced and renamed, so a name
// without a dot is a whole checkpoint, whenever the run is killed. On the mesh
// that wrote it a run goes on bit for bit, as if it had never stopped; on another
// one, or in another chapter, up to the rounding of sums.
//
// All ranks read and write the same folder: on several hosts it lies on a shared
// file system.

#include <cstdint>
#include <map>
#include <string>

#include "chapters/common/run/strategy.h"
#include "comm/process_group.h"

namespace shardbook {

/// The options of a run from its checkpoint on: with --resume, `first_step` is
/// the number of steps done in the newest checkpoint in --checkpoint (0 where
/// there is none yet), and `steps` the number left. Throws Error where that
/// checkpoint is of another run, naming every option that differs, or not
/// whole; without --resume, where the folder has checkpoints.
Options at_checkpoint(const Options& options);

/// Reads and writes the checkpoints of one training, on every rank.
class Checkpoints {
 public:
  /// Locks the folder, for as long as this lives, and looks into it again.
  /// `world` is null where there is one rank. Throws BadCheckpoint where the
  /// strategy cannot be resumed, where another run holds the folder, and where
  /// it is no longer as at_checkpoint found it. Collective.
  Checkpoints(const Options& options, Strategy& strategy, ProcessGroup* world);
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// Loads what at_checkpoint found. Throws BadCheckpoint, on all ranks, that
  /// names the file, tensor or option that does not fit. Collective.
  void load();
  /// Steps that f16 skipped before the first one, known after `load`: the
  /// learning rate does not count them.
  std::int64_t skipped_steps() const { return skipped_steps_; }

  /// Whether any rank was told to stop; the same on all ranks. Collective.
  bool agree_to_stop(bool is_told);
  /// Writes a checkpoint where one is due: every --checkpoint-every steps, at
  /// the end (`is_last`) and before a stop. A checkpoint with numbers that are
  /// not finite is left out: it would push out good ones. `skipped_steps`
  /// counts from the first step of the training. Throws RunError, on all ranks,
  /// when a file cannot be written; the checkpoints before it stay. Collective.
  void after_step(std::int64_t steps_done, std::int64_t skipped_steps,
                  bool is_last, bool is_finite);

  /// The folder of the newest checkpoint of this run; empty before the first.
  const std::string& newest() const { return newest_; }

 private:
  void save(std::int64_t steps_done);

  const Options& options_;
  Strategy& strategy_;
  ProcessGroup* world_;
  const bool is_main_;
  const bool is_on_shapes_;
  std::int64_t saved_step_ = 0;
  std::int64_t skipped_steps_ = 0;
  std::string newest_;
  int lock_ = -1;  ///< held on the folder by the main rank
};

}  // namespace shardbook
