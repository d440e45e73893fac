#pragma once

// A folder with the state of a training: the parts of all ranks, and numbers.
//
//   FOLDER/NAME/rank-00001-of-00004.safetensors  ...
//   FOLDER/NAME/engine.json                      steps, loss scale, scheduler

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"

namespace shardbook::engine::internal {

/// Runs `work` on every rank and throws the first rank's error everywhere.
void on_all_ranks(ProcessGroup& world, const std::function<void()>& work);

std::string text_of(const std::string& file);
/// The text goes into a file of another name first: a kill leaves the old file or
/// the new one.
void write_text(const std::string& file, const std::string& text);

/// Fills a folder of another name, which then becomes FOLDER/NAME. Collective.
void write_state_folder(ProcessGroup& world, const std::string& folder,
                        const std::string& name, const TrainingState& state,
                        const std::map<std::string, double>& numbers);
/// Fills the state from a folder that any number of ranks have written, and
/// returns its numbers. Throws Error, the same on all ranks, that names what
/// does not fit or which of `needed` is missing. Collective.
std::map<std::string, double> read_state_folder(
    ProcessGroup& world, const std::string& place, TrainingState& state,
    const std::vector<std::string>& needed);

}  // namespace shardbook::engine::internal
