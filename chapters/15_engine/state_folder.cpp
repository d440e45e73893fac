#include "chapters/15_engine/internal/state_folder.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/common/run/state_files.h"
#include "core/check.h"

namespace shardbook::engine::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "shardbook engine checkpoint 1";

}  // namespace

void on_all_ranks(ProcessGroup& world, const std::function<void()>& work) {
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

void write_text(const std::string& file, const std::string& text) {
  std::ofstream out(file + ".new");
  out << text << std::flush;
  SB_CHECK(out, "save_checkpoint: ", file, " cannot be written");
  fs::rename(file + ".new", file);
}

void write_state_folder(ProcessGroup& world, const std::string& folder,
                        const std::string& name, const TrainingState& state,
                        const std::map<std::string, double>& numbers) {
  const std::string place = folder + "/" + name;
  const std::string temporary = folder + "/." + name + ".tmp";
  const bool is_main = world.rank() == 0;
  on_all_ranks(world, [&] {
    if (!is_main) return;
    fs::remove_all(temporary);
    fs::create_directories(temporary);
  });
  on_all_ranks(world, [&] { write_state_file(temporary, state, &world); });
  on_all_ranks(world, [&] {
    if (!is_main) return;
    const nlohmann::json json = {{"format", kFormat},
                                 {"ranks", world.size()},
                                 {"numbers", numbers},
                                 {"strategy", state.numbers},
                                 {"agreed", state.agreed}};
    write_text(temporary + "/engine.json", json.dump(2) + "\n");
    fs::remove_all(place);
    fs::rename(temporary, place);
  });
}

std::map<std::string, double> read_state_folder(
    ProcessGroup& world, const std::string& place, TrainingState& state,
    const std::vector<std::string>& needed) {
  std::map<std::string, double> numbers, of_strategy;
  on_all_ranks(world, [&] {
    int ranks = 0;
    const std::string text = text_of(place + "/engine.json");
    try {
      const auto json = nlohmann::json::parse(text);
      SB_CHECK(json.at("format") == kFormat, "another format");
      ranks = json.at("ranks").get<int>();
      json.at("numbers").get_to(numbers);
      json.at("strategy").get_to(of_strategy);
    } catch (const std::exception&) {
      SB_FAIL("load_checkpoint: ", place,
              "/engine.json is damaged or of another program");
    }
    for (const auto& [name, value] : state.numbers) {
      SB_CHECK(of_strategy.count(name) > 0, "load_checkpoint: ", place,
               " keeps no ", name, ", which this training needs");
    }
    for (const std::string& name : needed) {
      SB_CHECK(numbers.count(name) > 0, "load_checkpoint: ", place,
               "/engine.json keeps no ", name);
    }
    const StateFiles files(place, ranks);
    files.check(state, /*with_optimizer=*/true);
    files.load(state, /*with_optimizer=*/true);
  });
  if (state.loaded) state.loaded(of_strategy);
  return numbers;
}

}  // namespace shardbook::engine::internal
