#pragma once

// Configs as the program reads them, and whole runs of what they choose.

#include <string>

#include "chapters/15_engine/strategies.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/support/errors.h"

namespace shardbook::engine {

inline Options options_for(int world_size) {
  return tiny_gpt("15_engine", world_size);
}

/// A choice as the program runs it.
inline ChapterRun run_of(const Choice& choice) {
  ChapterRun chapter;
  chapter.fold_class = choice.fold_class;
  chapter.rank = [choice](const Options& options, ProcessGroup& world,
                          Run& run) {
    DeviceMesh mesh(world, choice.topology);
    const auto strategy = choice.make(options, mesh);
    run.train(options, *strategy);
  };
  chapter.reference = choice.reference;
  return chapter;
}

/// Compares with one device if the world has data.
inline Report train_choice(const Options& options, const Choice& choice) {
  return run_and_compare(options, run_of(choice));
}

/// The options that the config fills go to the strategy that it chooses.
inline Report train_config(Options options, const DeepSpeedConfig& config) {
  apply_config(config, data_parallel_ranks(options, config), {}, options);
  return train_choice(options, choose(options, config));
}
inline Report train_config(const Options& options, const std::string& text) {
  return train_config(options, DeepSpeedConfig::parse(text, "ds.json"));
}

/// An error, or a config with the remarks about the text.
struct Outcome {
  std::string error;    ///< empty: the text is a config
  std::string json;     ///< every key with its value
  std::string remarks;  ///< a line each
};

/// For a text that begins with '{'. The options fill "auto".
inline Outcome outcome_of(const std::string& text, int world_size = 1) {
  Outcome outcome;
  outcome.error = error_of([&] {
    const auto config = read_config(text, options_for(world_size), {});
    outcome.json = config.to_json();
    for (const std::string& remark : config.remarks) {
      outcome.remarks += remark + "\n";
    }
  });
  return outcome;
}

}  // namespace shardbook::engine
