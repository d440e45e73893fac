// Checkpoints of an engine.
//
//   FOLDER/latest                            the newest tag
//   FOLDER/TAG/rank-00001-of-00004.safetensors  ...
//   FOLDER/TAG/engine.json                   steps, loss scale, scheduler

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "chapters/common/run/state_files.h"
#include "core/check.h"

namespace shardbook::engine {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "shardbook engine checkpoint 1";

/// Runs `work` on every rank and throws the first rank's error everywhere.
template <typename Work>
void on_all_ranks(ProcessGroup& world, const Work& work) {
  std::string mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine = error.what();
  }
  for (const std::string& text : world.exchange(mine)) {
    SB_CHECK(text.empty(), text);
  }
}

std::string text_of(const std::string& file) {
  std::ifstream in(file);
  SB_CHECK(in, "load_checkpoint: ", file, " cannot be read");
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// Under another name first, so that a kill leaves the old file or the new one.
void write_text(const std::string& file, const std::string& text) {
  std::ofstream out(file + ".new");
  out << text << std::flush;
  SB_CHECK(out, "save_checkpoint: ", file, " cannot be written");
  fs::rename(file + ".new", file);
}

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
  if (scaler_) {
    for (const auto& [name, value] : scaler_->state()) {
      all["scaler." + name] = value;
    }
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
  if (!scaler_) return;
  std::map<std::string, double> scaler;
  for (const auto& [name, value] : all) {
    if (name.rfind("scaler.", 0) == 0) scaler[name.substr(7)] = value;
  }
  // A training in another dtype has kept none
  if (!scaler.empty()) scaler_->load_state(scaler);
}

TrainingState Engine::state() {
  return model_ ? model_->state() : strategy_->state();
}

void Engine::save_checkpoint(const std::string& folder,
                             const std::string& tag) {
  SB_CHECK(
      micro_steps_ % sizes_.accumulation == 0 || boundary_,
      "save_checkpoint: between the micro-steps of a step, whose gradients "
      "would be lost; call it after step has acted");
  const TrainingState state = this->state();
  const std::string place = folder + "/" + tag;
  const std::string temporary = folder + "/." + tag + ".tmp";
  const bool is_main = world_.rank() == 0;
  on_all_ranks(world_, [&] {
    check_tag(tag);
    if (!is_main) return;
    fs::remove_all(temporary);
    fs::create_directories(temporary);
  });
  on_all_ranks(world_, [&] { write_state_file(temporary, state, &world_); });
  on_all_ranks(world_, [&] {
    if (!is_main) return;
    const nlohmann::json json = {{"format", kFormat},
                                 {"ranks", world_.size()},
                                 {"numbers", numbers()},
                                 {"strategy", state.numbers},
                                 {"agreed", state.agreed}};
    write_text(temporary + "/engine.json", json.dump(2) + "\n");
    fs::remove_all(place);
    fs::rename(temporary, place);
    write_text(folder + "/latest", tag + "\n");
  });
}

std::string Engine::load_checkpoint(const std::string& folder,
                                    const std::string& tag) {
  TrainingState state = this->state();
  std::string found = tag;
  std::map<std::string, double> own, of_strategy;
  on_all_ranks(world_, [&] {
    if (found.empty()) {
      std::istringstream(text_of(folder + "/latest")) >> found;
    }
    const std::string place = folder + "/" + found;
    int ranks = 0;
    const std::string text = text_of(place + "/engine.json");
    try {
      const auto json = nlohmann::json::parse(text);
      SB_CHECK(json.at("format") == kFormat, "another format");
      ranks = json.at("ranks").get<int>();
      json.at("numbers").get_to(own);
      json.at("strategy").get_to(of_strategy);
    } catch (const std::exception&) {
      SB_FAIL("load_checkpoint: ", place,
              "/engine.json is damaged or of another program");
    }
    for (const auto& [name, value] : state.numbers) {
      SB_CHECK(of_strategy.count(name) > 0, "load_checkpoint: ", place,
               " keeps no ", name, ", which this engine needs");
    }
    for (const char* name : {"global_steps", "global_samples", "micro_steps",
                             "skipped_steps", "lr"}) {
      SB_CHECK(own.count(name) > 0, "load_checkpoint: ", place,
               "/engine.json keeps no ", name);
    }
    const StateFiles files(place, ranks);
    files.check(state, /*with_optimizer=*/true);
    files.load(state, /*with_optimizer=*/true);
  });
  if (state.loaded) state.loaded(of_strategy);
  set_numbers(own);
  return found;
}

}  // namespace shardbook::engine
