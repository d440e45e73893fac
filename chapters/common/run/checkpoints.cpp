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
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/run/state_files.h"
#include "core/check.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Texts = std::map<std::string, std::string>;

constexpr char kFormat[] = "shardbook checkpoint 1";
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

[[noreturn]] void fail(const std::string& path, const char* step) {
  SB_FAIL(path, ": cannot ", step, ": ", std::strerror(errno));
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) fail(folder, "open the folder");
  const int failed = ::fsync(descriptor);
  ::close(descriptor);
  // Some file systems have nothing to sync in a folder and say so
  if (failed != 0 && errno != EINVAL && errno != ENOTSUP) {
    fail(folder, "sync the folder");
  }
}

void write_synced(const std::string& path, const std::string& text) {
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) fail(path, "create the file");
  const ssize_t written = ::write(descriptor, text.data(), text.size());
  const bool is_whole = written == static_cast<ssize_t>(text.size());
  if (written >= 0 && !is_whole) errno = ENOSPC;
  const bool is_synced = is_whole && ::fsync(descriptor) == 0;
  const int cause = errno;
  ::close(descriptor);
  errno = cause;
  if (!is_synced) fail(path, "write the file");
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
  if (lock < 0) fail(path, "create the file");
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

/// All options that decide about the numbers of a run, apart from the mesh.
Texts identity_of(const Options& options) {
  const ModelConfig config = model_config(options);
  const OptimizerOptions& opt = options.optimizer_options;
  Texts run;
  const Json model = Json::parse(config.to_json());
  for (const auto& [key, value] : model.items()) {
    if (key != "architectures") run["model's " + key] = value.dump();
  }
  run["--dtype"] = dtype_name(options.dtype);
  run["--data"] = options.data;
  run["data's fingerprint"] =
      fmt::format("{:016x}", Dataset::open(options, config).fingerprint());
  run["--batch"] = std::to_string(options.batch);
  run["--seq"] = std::to_string(options.seq);
  if (config.is_image()) {
    run["--image-size"] = std::to_string(options.image_size);
  }
  run["--seed"] = std::to_string(options.seed);
  run["--dropout"] = fmt::format("{}", options.dropout);
  run["--optimizer"] = options.optimizer;
  run["--lr"] = fmt::format("{}", opt.lr);
  run["--weight-decay"] = fmt::format("{}", opt.weight_decay);
  if (options.optimizer == "sgd") {
    run["--momentum"] = fmt::format("{}", opt.momentum);
    run["--nesterov"] = fmt::format("{}", opt.nesterov);
  } else {
    run["--beta1"] = fmt::format("{}", opt.beta1);
    run["--beta2"] = fmt::format("{}", opt.beta2);
    run["--eps"] = fmt::format("{}", opt.eps);
  }
  run["--clip"] = fmt::format("{}", options.clip);
  run["--lr-schedule"] = options.lr_schedule;
  run["--warmup"] = std::to_string(options.warmup);
  // The other schedules reach their end with the last step
  if (options.lr_schedule != "constant") {
    run["--steps"] = std::to_string(options.first_step + options.steps);
  }
  return run;
}

/// "--lr 0.1 there, 0.2 here; ..."; empty where the two are equal. A key of the
/// model that one of them lacks is no difference: another version of the program
/// wrote more of what is the same in all models.
std::string differences(const Texts& there, const Texts& here) {
  std::set<std::string> keys;
  for (const auto& [key, value] : there) keys.insert(key);
  for (const auto& [key, value] : here) keys.insert(key);
  const auto value_in = [](const Texts& texts, const std::string& key) {
    const auto found = texts.find(key);
    return found == texts.end() ? std::string("not set") : found->second;
  };
  std::string text;
  for (const std::string& key : keys) {
    const std::string a = value_in(there, key), b = value_in(here, key);
    const bool is_new = there.count(key) != here.count(key);
    if (a == b || (is_new && key.rfind("model's ", 0) == 0)) continue;
    text +=
        (text.empty() ? "" : "; ") + key + " " + a + " there, " + b + " here";
  }
  return text;
}

struct Manifest {
  std::int64_t steps_done = 0;
  std::int64_t skipped_steps = 0;
  int ranks = 0;
  Texts run, agreed;
  std::map<std::string, double> numbers;
};

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  std::ifstream file(path);
  SB_CHECK(file, path, ": cannot be read; ", folder,
           " is no whole checkpoint: remove it, and --resume takes the one "
           "before it");
  std::stringstream text;
  text << file.rdbuf();
  Manifest manifest;
  try {
    const Json json = Json::parse(text.str());
    SB_CHECK(json.at("format") == kFormat, "another format");
    manifest.steps_done = json.at("steps_done").get<std::int64_t>();
    manifest.skipped_steps = json.value("skipped_steps", std::int64_t{0});
    manifest.ranks = json.at("ranks").get<int>();
    manifest.run = json.at("run").get<Texts>();
    manifest.agreed = json.at("agreed").get<Texts>();
    manifest.numbers = json.at("numbers").get<std::map<std::string, double>>();
    SB_CHECK(manifest.ranks >= 1 && manifest.ranks <= 1 << 20, "no ranks");
  } catch (const std::exception&) {
    SB_FAIL(path, ": is damaged or of another program; remove ", folder,
            ", and --resume takes the checkpoint before it");
  }
  return manifest;
}

std::string manifest_text(const Options& options, const TrainingState& state,
                          std::int64_t steps_done, std::int64_t skipped_steps,
                          int ranks) {
  const Json json = {{"format", kFormat},
                     {"steps_done", steps_done},
                     {"skipped_steps", skipped_steps},
                     {"ranks", ranks},
                     {"chapter", options.chapter},
                     {"run", identity_of(options)},
                     {"agreed", state.agreed},
                     {"numbers", state.numbers}};
  return json.dump(2) + "\n";
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
  const Manifest manifest = read_manifest(folder);
  const std::string other = differences(manifest.run, identity_of(options));
  SB_CHECK(other.empty(), "--resume: ", folder, " is of another run: ", other);
  SB_CHECK(manifest.steps_done <= options.steps, "--steps ", options.steps,
           ": ", folder, " has done ", manifest.steps_done,
           " steps; give at least as many");
  Options rest = options;
  rest.first_step = manifest.steps_done;
  rest.steps -= rest.first_step;
  // Ranks of several hosts compare what they have found
  rest.effective.emplace_back("--resume from step",
                              std::to_string(rest.first_step));
  return rest;
}

// --- One training ------------------------------------------------------------

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
  const std::string error = first_error([&] {
    if (!is_main_) return;
    fs::create_directories(options.checkpoint);
    lock_ = lock_folder(options.checkpoint);
  });
  if (!error.empty()) throw BadCheckpoint(error);
  if (options.first_step > 0) newest_ = folder_of(options, saved_step_);
}

Checkpoints::~Checkpoints() {
  if (lock_ >= 0) ::close(lock_);
}

/// Runs `work` on every rank, and returns the first rank's error everywhere.
template <typename Work>
std::string Checkpoints::first_error(const Work& work) {
  std::string mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine = error.what();
  }
  if (world_ == nullptr || is_on_shapes_) return mine;
  for (const std::string& text : world_->exchange(mine)) {
    if (!text.empty()) return text;
  }
  return "";
}

void Checkpoints::load() {
  if (options_.first_step == 0) return;
  const std::string folder = folder_of(options_, options_.first_step);
  TrainingState state = strategy_.state();
  const Manifest manifest = read_manifest(folder);
  // Without steps to come, weights are all that is needed
  const bool with_optimizer = options_.steps > 0;
  std::optional<StateFiles> files;
  std::string error = first_error([&] {
    const std::string other = differences(manifest.agreed, state.agreed);
    SB_CHECK(other.empty(), folder, " is of another run: ", other);
    for (const auto& [name, value] : manifest.numbers) {
      SB_CHECK(state.numbers.count(name) > 0, folder, ": keeps a ", name,
               ", this run has none");
    }
    for (const auto& [name, value] : state.numbers) {
      SB_CHECK(manifest.numbers.count(name) > 0, folder, ": keeps no ", name,
               ", which this run needs");
    }
    files.emplace(folder, manifest.ranks);
    files->check(state, with_optimizer);
  });
  if (error.empty()) {
    error = first_error([&] {
      // Every parameter that was kept has its place on some rank
      std::string mine;
      for (const StatePart& part : state.parts) mine += part.name + "\n";
      std::vector<std::string> all = {mine};
      if (is_on_shapes_) return files->load(state, with_optimizer);
      if (world_ != nullptr) all = world_->exchange(mine);
      std::set<std::string> names;
      for (const std::string& text : all) {
        std::istringstream lines(text);
        for (std::string name; std::getline(lines, name);) names.insert(name);
      }
      for (const std::string& name : files->names()) {
        SB_CHECK(names.count(name) > 0, folder, ": holds '", name,
                 "', which this run's model has not");
      }
      files->load(state, with_optimizer);
    });
  }
  if (!error.empty()) throw BadCheckpoint("--resume: " + error);
  skipped_steps_ = manifest.skipped_steps;
  if (state.loaded) state.loaded(manifest.numbers);
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
  const TrainingState state = strategy_.state();
  const std::string name = name_of(steps_done);
  const std::string temporary = options_.checkpoint + "/." + name + ".tmp";
  const std::string folder = folder_of(options_, steps_done);
  const int ranks = world_ == nullptr ? 1 : world_->size();
  std::string error = first_error([&] {
    if (!is_main_) return;
    remove_unfinished(options_.checkpoint);
    fs::create_directory(temporary);
  });
  if (error.empty()) {
    error = first_error([&] { write_state_file(temporary, state, world_); });
  }
  if (error.empty()) {
    error = first_error([&] {
      if (!is_main_) return;
      write_synced(
          temporary + "/manifest.json",
          manifest_text(options_, state, steps_done, skipped_steps_, ranks));
      sync_folder(temporary);
      fs::rename(temporary, folder);
      sync_folder(options_.checkpoint);
      remove_old(options_.checkpoint);
    });
  }
  if (!error.empty()) {
    std::error_code ignored;
    if (is_main_) fs::remove_all(temporary, ignored);
    throw RunError("--checkpoint: not kept after step " +
                   std::to_string(steps_done) + ": " + error +
                   (newest_.empty() ? "" : "; " + newest_ + " is whole"));
  }
  saved_step_ = steps_done;
  newest_ = folder;
}

}  // namespace shardbook
