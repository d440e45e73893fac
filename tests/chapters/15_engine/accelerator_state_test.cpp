// save_state and load_state: training continues as if it had not stopped, under
// the same plugin or another.

#include "tests/chapters/15_engine/accelerator_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::accelerate {
namespace {

Script plain() {
  Script script;
  script.batch_size = 2;
  script.samples = 16;
  script.epochs = 2;
  script.options.gradient_accumulation_steps = 2;
  script.max_norm = 0;
  script.rate = [](std::int64_t k) { return 0.01 / (1 + 0.1 * double(k)); };
  return script;
}

std::vector<double> tail(const std::vector<double>& all, std::size_t from) {
  return {all.begin() + static_cast<long>(from), all.end()};
}

TEST(AcceleratorState, TrainingGoesOnUnderAnyPlugin) {
  const Plugins plugins = {Ddp{}, Fsdp{}, stage(2), Megatron{1, 1, 2}};
  const Trace whole = run_on(2, plain())[0];
  ASSERT_EQ(whole.losses.size(), 4u);
  for (std::size_t writer = 0; writer < plugins.size(); ++writer) {
    // Stop in the middle of an epoch
    const TempFolder folder;
    Script script = plain();
    script.options.plugin = plugins[writer];
    script.stop_after = 1;
    script.save_to = folder / "step-1";
    EXPECT_EQ(run_on(2, script)[0].losses.size(), 1u);
    script.stop_after = 0;
    script.load_from = script.save_to;
    for (const std::size_t reader : {writer, (writer + 1) % plugins.size()}) {
      script.options.plugin = plugins[reader];
      const Trace rest = run_on(2, script)[0];
      EXPECT_LT(largest_gap(rest.losses, tail(whole.losses, 1)), kTolerance)
          << writer << " -> " << reader;
      EXPECT_EQ(rest.scheduler_steps, whole.scheduler_steps);
    }
  }
}

TEST(AcceleratorState, OtherNumbersOfProcessesGoOnWithTheSameSamples) {
  const TempFolder folder;
  Script script = plain();
  script.rate = {};
  const Trace whole = run_on(2, script)[0];
  script.stop_after = 1;
  script.save_to = folder / "step-1";
  run_on(2, script);
  script.stop_after = 0;
  script.load_from = script.save_to;
  script.batch_size = 1;
  const Trace rest = run_on(4, script)[0];
  EXPECT_LT(largest_gap(rest.losses, tail(whole.losses, 1)), kTolerance);
  // After the 8 samples read, a round of 6 samples is incomplete
  script.batch_size = 3;
  expect_text(error_of(script), {"load_state", "batch_size"});
}

TEST(AcceleratorState, IsRefusedInsideAWindow) {
  const TempFolder folder;
  Script script = plain();
  script.clip = [&](Accelerator& acc, PreparedModel&) {
    if (!acc.sync_gradients()) acc.save_state(folder / "half");
  };
  expect_text(error_of(script), {"window"});
}

TEST(AcceleratorState, OfNoTrainingNamesTheFile) {
  const TempFolder folder;
  Script script = plain();
  script.load_from = folder / "nothing";
  expect_text(error_of(script), {"nothing/manifest.json"});
}

}  // namespace
}  // namespace shardbook::accelerate
