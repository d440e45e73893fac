// The engine: one JSON config chooses among all strategies of the book.
//
//   ch15_engine --world-size 4 --config ds.json
//   ch15_engine --world-size 4 --dtype f64
//     --config chapters/15_engine/configs/moe.json
//   ch15_engine --world-size 8 --steps 10
//     --config chapters/15_engine/configs/pipeline.json
//
// Needed: 14_hybrid_3d. The last chapter.

#include "chapters/15_engine/program.h"

#include <cstdio>

#include "chapters/15_engine/strategies.h"

namespace shardbook::engine {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own. The config
  // fills those that it has a key for.
  auto& options = line.own<Options>();
  auto& file = line.own<std::string>("{}");
  bool& prints_config = line.own<bool>(false);
  line.describe("ch15_engine", "One config, any strategy.");
  add_shared_options(line, options);
  line.add({"--config", "its keys are compared one by one"}, &file,
           "FILE.json with DeepSpeed's keys, or the text itself, {...}");
  line.add({"--print-config", may_differ::kOutput}, &prints_config,
           "print what acts, what was filled in, what has no effect, and "
           "every key with its value, and exit");
  line.refuse("--micro-batches",
              "the config has them: gradient_accumulation_steps");
  line.parse();
  const auto config = read_config(file, options, line.given());
  const int dp = data_parallel_ranks(options, config);
  apply_config(config, dp, line.given(), options);
  check_options(options);
  const Choice choice = choose(options, config);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = choice.fold_class;
  chapter.rank = [choice](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: those of the chosen strategy.
    DeviceMesh mesh(world, choice.topology);

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: the engine, around a library of its chapter.
    const auto strategy = choice.make(options, mesh);

    // 6. Train a few steps on the same data.
    run.train(options, *strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = choice.reference;

  // A config is printed if a run can begin.
  if (prints_config) {
    return instead_of_training([&options, chapter, config] {
      check_run(options, chapter);
      std::fputs(config.explained().c_str(), stdout);
      return 0;
    });
  }

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  chapter.add_to_report = [choice, config](Report& report) {
    report.remarks = describe(choice, config) + report.remarks;
  };
  return {options, chapter};
}

}  // namespace shardbook::engine
