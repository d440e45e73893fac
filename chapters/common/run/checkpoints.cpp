#include "chapters/common/run/checkpoints.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/run_identity.h"
#include "chapters/common/run/state_folder.h"
#include "comm/launch.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kKept = 2;

// --- The folder --------------------------------------------------------------

std::string name_of(std::int64_t steps_done) {
  return fmt::format("step-{:08}", steps_done);
}

std::string folder_of(const Options& options, std::int64_t steps_done) {
  return options.checkpoint + "/" + name_of(steps_done);
}

/// The steps of all checkpoints in a folder, which may be missing, from the first
/// on.
std::vector<std::int64_t> steps_in(const std::string& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  if (!fs::exists(folder, error)) return steps;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    long long step = 0;
    if (std::sscanf(name.c_str(), "step-%lld", &step) != 1) continue;
    if (name_of(step) == name) steps.push_back(step);
  }
  SB_CHECK(!error, "--checkpoint ", folder,
           ": cannot be read: ", error.message());
  std::sort(steps.begin(), steps.end());
  return steps;
}

void check_folder(const std::string& folder) {
  std::error_code ignored;
  if (fs::exists(folder, ignored)) {
    SB_CHECK(fs::is_directory(folder, ignored), "--checkpoint ", folder,
             ": it is a file; give the name of a folder");
    SB_CHECK(access(folder.c_str(), R_OK | W_OK | X_OK) == 0, "--checkpoint ",
             folder, ": cannot be read and written: ", std::strerror(errno));
    return;
  }
  fs::path parent = fs::path(folder).parent_path();
  if (parent.empty()) parent = ".";
  SB_CHECK(access(parent.c_str(), W_OK | X_OK) == 0, "--checkpoint ", folder,
           ": cannot create a folder in ", parent.string(), ": ",
           std::strerror(errno));
}

/// Folders that a killed run was writing, or removing.
void remove_unfinished(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(".step-", 0) == 0) fs::remove_all(entry.path());
  }
}

void remove_old(const std::string& folder) {
  const std::vector<std::int64_t> steps = steps_in(folder);
  for (std::size_t i = 0; i + kKept < steps.size(); ++i) {
    // Without its name it is no checkpoint any more, even if half is left
    const std::string name = name_of(steps[i]);
    fs::rename(folder + "/" + name, folder + "/." + name + ".tmp");
  }
  remove_unfinished(folder);
}

int lock_folder(const std::string& folder) {
  const std::string path = folder + "/.lock";
  const int lock = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  SB_CHECK(lock >= 0, path, ": cannot create the file: ", std::strerror(errno));
  // A run that was killed a moment ago may still be ending
  for (int tenths = 0; ::flock(lock, LOCK_EX | LOCK_NB) != 0; ++tenths) {
    if (errno == EWOULDBLOCK && tenths < 50) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      continue;
    }
    const bool is_taken = errno == EWOULDBLOCK;
    ::close(lock);
    if (!is_taken) return -1;  // a file system without locks
    SB_FAIL("--checkpoint ", folder,
            ": another run keeps its checkpoints here; give a folder of its "
            "own to each run");
  }
  return lock;
}

// --- The manifest ------------------------------------------------------------

Manifest manifest_in(const std::string& folder) {
  try {
    return read_manifest(folder, {"steps_done", "skipped_steps"});
  } catch (const Error& error) {
    SB_FAIL(error.what(), "; or remove ", folder,
            ", and --resume takes the checkpoint before it");
  }
}

}  // namespace

TrainingState Strategy::state() {
  throw BadCheckpoint(
      "--checkpoint: this training cannot be kept; leave the option out");
}

Options at_checkpoint(const Options& options) {
  if (options.checkpoint.empty()) return options;
  check_folder(options.checkpoint);
  const std::vector<std::int64_t> steps = steps_in(options.checkpoint);
  if (steps.empty()) return options;
  const std::string folder = folder_of(options, steps.back());
  SB_CHECK(options.resume, "--checkpoint ", options.checkpoint, ": holds ",
           name_of(steps.back()),
           "; give --resume to go on from it, or another folder");
  const Manifest manifest = manifest_in(folder);
  const auto steps_done =
      static_cast<std::int64_t>(manifest.progress.at("steps_done"));
  const std::string other = differences(manifest, identity_of(options));
  SB_CHECK(other.empty(), "--resume: ", folder, " is of another run: ", other);
  SB_CHECK(steps_done <= options.steps, "--steps ", options.steps, ": ", folder,
           " has done ", how_many(steps_done, "step"),
           "; give at least as many");
  Options rest = options;
  rest.first_step = steps_done;
  rest.steps -= rest.first_step;
  // Ranks of several hosts compare what they have found
  rest.effective.emplace_back("--resume from step",
                              std::to_string(rest.first_step));
  return rest;
}

// --- One training ------------------------------------------------------------

namespace {

/// Looks into the folder again, now that this run has it for itself: another run
/// may have been here since at_checkpoint.
void look_again(const Options& options) {
  const std::vector<std::int64_t> steps = steps_in(options.checkpoint);
  const std::int64_t newest = steps.empty() ? 0 : steps.back();
  SB_CHECK(newest >= options.first_step, "--checkpoint ", options.checkpoint,
           ": ", name_of(options.first_step),
           " is gone since this run looked; start it again");
  SB_CHECK(newest == options.first_step, "--checkpoint ", options.checkpoint,
           ": another run has written ", name_of(newest),
           " since this one looked; give a folder of its own to each run, or "
           "--resume when the other has ended");
  Options whole = options;
  whole.steps += whole.first_step;
  whole.first_step = 0;
  at_checkpoint(whole);
}

}  // namespace

Checkpoints::Checkpoints(const Options& options, Strategy& strategy,
                         ProcessGroup* world)
    : options_(options),
      strategy_(strategy),
      world_(world),
      is_main_(world == nullptr || world->rank() == 0),
      is_on_shapes_(options.backend == "sim"),
      saved_step_(options.first_step) {
  if (options.checkpoint.empty()) return;
  strategy.state();  // or an Error
  if (is_on_shapes_) return;
  try {
    on_all_ranks(world, [&] {
      if (!is_main_) return;
      fs::create_directories(options.checkpoint);
      lock_ = lock_folder(options.checkpoint);
      look_again(options);
    });
  } catch (const StateError& error) {
    throw BadCheckpoint(error.what());
  }
  if (options.first_step > 0) newest_ = folder_of(options, saved_step_);
}

Checkpoints::~Checkpoints() {
  if (lock_ >= 0) ::close(lock_);
}

void Checkpoints::load() {
  if (options_.first_step == 0) return;
  const std::string folder = folder_of(options_, options_.first_step);
  const TrainingState state = strategy_.state();
  try {
    const Manifest manifest = manifest_in(folder);
    skipped_steps_ =
        static_cast<std::int64_t>(manifest.progress.at("skipped_steps"));
    // At the end of training, only the weights are needed
    load_state_folder(folder, manifest, state,
                      /*with_optimizer=*/options_.steps > 0, world_);
  } catch (const Error& error) {
    throw BadCheckpoint(std::string("--resume: ") + error.what());
  }
}

bool Checkpoints::agree_to_stop(bool is_told) {
  if (world_ == nullptr) return is_told;
  const auto texts = world_->exchange(is_told ? "stop" : "");
  return std::any_of(texts.begin(), texts.end(),
                     [](const std::string& text) { return !text.empty(); });
}

void Checkpoints::after_step(std::int64_t steps_done,
                             std::int64_t skipped_steps, bool is_last,
                             bool is_finite) {
  skipped_steps_ = skipped_steps;
  const bool is_due = options_.checkpoint_every > 0 &&
                      steps_done % options_.checkpoint_every == 0;
  if ((!is_due && !is_last) || steps_done == saved_step_) return;
  if (agree_to_stop(!is_finite)) {
    if (is_main_) {
      fmt::print(stderr,
                 "--checkpoint {}: not kept after step {}: losses are not "
                 "finite\n",
                 options_.checkpoint, steps_done);
    }
    return;
  }
  save(steps_done);
}

void Checkpoints::save(std::int64_t steps_done) {
  Manifest manifest;
  put_identity(identity_of(options_), manifest);
  manifest.progress = {{"steps_done", static_cast<double>(steps_done)},
                       {"skipped_steps", static_cast<double>(skipped_steps_)}};
  const TrainingState state = strategy_.state();
  const std::string& folder = options_.checkpoint;
  try {
    on_all_ranks(world_, [&] {
      if (!is_main_) return;
      // File systems without locks let two runs in
      const std::vector<std::int64_t> steps = steps_in(folder);
      SB_CHECK(steps.empty() || steps.back() <= saved_step_, folder, " holds ",
               name_of(steps.back()),
               " of another run; give a folder of its own to each run");
      remove_unfinished(folder);
    });
    write_state_folder(folder, name_of(steps_done), state, manifest, world_);
    on_all_ranks(world_, [&] {
      if (is_main_) remove_old(folder);
    });
  } catch (const StateError& error) {
    throw RunError("--checkpoint: not kept after step " +
                   std::to_string(steps_done) + ": " + error.what() +
                   (fs::exists(newest_) ? "; " + newest_ + " is whole" : ""));
  }
  saved_step_ = steps_done;
  newest_ = folder_of(options_, steps_done);
}

}  // namespace shardbook
