#pragma once

// A whole checkpoint: the files of all ranks (state_files.h) and a manifest,
// which appear together or not at all. The shell's --checkpoint, the engine's
// save_checkpoint and the Accelerator's save_state write the same:
//
//   FOLDER/NAME/rank-00001-of-00004.safetensors    parts of rank 0
//               ...
//               manifest.json                      the run, and how far it is
//   FOLDER/.NAME.tmp/...                           one that is being written

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/check.h"

namespace shardbook {

/// A rank's failure to write or read a checkpoint, thrown on all ranks.
class StateError : public Error {
 public:
  using Error::Error;
};

struct Manifest {
  int ranks = 1;  ///< as many files
  /// What determines the numbers of a run (run_identity.h): names and values.
  std::map<std::string, std::string> run;
  /// The values of the same names in programs that do not have them.
  std::map<std::string, std::string> otherwise;
  std::map<std::string, std::string> agreed;  ///< TrainingState::agreed
  std::map<std::string, double> numbers;      ///< TrainingState::numbers
  std::map<std::string, double> progress;     ///< "steps_done", ...
};

/// Throws Error that names the file where it is missing, damaged, of another
/// program, of an older format, or lacks one of `needed` in its progress.
Manifest read_manifest(const std::string& folder,
                       const std::vector<std::string>& needed);

/// Runs `work` on every rank; throws the first rank's error as StateError on all
/// of them. `world` is null where there is one rank. Collective.
void on_all_ranks(ProcessGroup* world, const std::function<void()>& work);

/// Writes FOLDER/NAME in place of what was there: under a temporary name, synced
/// and renamed. Of the manifest, `run`, `otherwise` and `progress` are the
/// caller's. Throws StateError. Collective.
void write_state_folder(const std::string& folder, const std::string& name,
                        const TrainingState& state, Manifest manifest,
                        ProcessGroup* world);

/// Fills `state` from a checkpoint of any number of ranks, and calls
/// `state.loaded`. `with_optimizer` false: parameters and buffers only. Throws
/// StateError that names the file, tensor or option that does not fit.
/// Collective.
void load_state_folder(const std::string& folder, const Manifest& manifest,
                       const TrainingState& state, bool with_optimizer,
                       ProcessGroup* world);

/// Replaces a file as a whole. Throws Error that names the path and the cause.
void write_whole_file(const std::string& path, const std::string& text);

}  // namespace shardbook
