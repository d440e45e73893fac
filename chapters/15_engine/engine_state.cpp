// Checkpoints of an engine.
//
//   FOLDER/latest                            the newest tag
//   FOLDER/TAG/rank-00001-of-00004.safetensors  ...
//   FOLDER/TAG/manifest.json                 steps, loss scale, scheduler

#include <fstream>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "chapters/common/run/state_folder.h"
#include "core/check.h"

namespace shardbook::engine {
namespace {

void check_tag(const std::string& tag) {
  SB_CHECK(!tag.empty() && tag[0] != '.' &&
               tag.find('/') == std::string::npos && tag != "latest",
           "save_checkpoint: tag \"", tag,
           "\" is no name of a folder; give one such as global_step100");
}

}  // namespace

std::map<std::string, double> Engine::numbers() const {
  std::map<std::string, double> all = {
      {"global_steps", static_cast<double>(global_steps_)},
      {"global_samples", static_cast<double>(global_samples_)},
      {"micro_steps", static_cast<double>(micro_steps_)},
      {"skipped_steps", static_cast<double>(skipped_steps_)},
      {"lr", get_lr()}};
  if (scheduler_) {
    all["scheduler"] = static_cast<double>(scheduler_->steps_done());
  }
  if (!scaler_) return all;
  for (const auto& [name, value] : scaler_->state()) {
    all["scaler." + name] = value;
  }
  return all;
}

void Engine::set_numbers(const std::map<std::string, double>& all) {
  const auto count = [&](const std::string& name) {
    return static_cast<std::int64_t>(all.at(name));
  };
  global_steps_ = count("global_steps");
  global_samples_ = count("global_samples");
  micro_steps_ = count("micro_steps");
  skipped_steps_ = count("skipped_steps");
  set_lr(all.at("lr"));
  if (scheduler_ && all.count("scheduler") > 0) {
    scheduler_->set_steps_done(count("scheduler"));
    set_lr(scheduler_->lr());
  }
  std::map<std::string, double> scaler;
  for (const auto& [name, value] : all) {
    if (name.rfind("scaler.", 0) == 0) scaler[name.substr(7)] = value;
  }
  // A training in another dtype has kept none
  if (scaler_ && !scaler.empty()) scaler_->load_state(scaler);
}

TrainingState Engine::state() {
  return model_ ? model_->state() : strategy_->state();
}

void Engine::save_checkpoint(const std::string& folder,
                             const std::string& tag) {
  SB_CHECK(micro_steps_ % sizes_.accumulation == 0 || boundary_,
           "save_checkpoint: between the micro-steps of a step, whose "
           "gradients would be lost; call it after step has acted");
  on_all_ranks(&world_, [&] { check_tag(tag); });
  Manifest manifest;
  manifest.progress = numbers();
  write_state_folder(folder, tag, state(), manifest, &world_);
  on_all_ranks(&world_, [&] {
    if (world_.rank() == 0) write_whole_file(folder + "/latest", tag + "\n");
  });
}

std::string Engine::load_checkpoint(const std::string& folder,
                                    const std::string& tag) {
  std::string found = tag;
  Manifest manifest;
  on_all_ranks(&world_, [&] {
    if (found.empty()) {
      std::ifstream latest(folder + "/latest");
      SB_CHECK(latest >> found, "load_checkpoint: ", folder,
               "/latest cannot be read");
    }
    manifest = read_manifest(folder + "/" + found,
                             {"global_steps", "global_samples", "micro_steps",
                              "skipped_steps", "lr"});
  });
  load_state_folder(folder + "/" + found, manifest, state(),
                    /*with_optimizer=*/true, &world_);
  set_numbers(manifest.progress);
  return found;
}

}  // namespace shardbook::engine
