// The data-parallel chapters with ranks that are processes, and interrupted.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/cli/programs.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

/// The report of a short run in which all sums have one order.
json deterministic_report_of(const std::string& chapter,
                             const std::string& options) {
  const Outcome outcome =
      run(chapter,
          "--format json --data random --steps 3 --batch 12 --seq 8 "
          "--deterministic " +
              options);
  EXPECT_EQ(outcome.status, 0) << chapter << " " << options << "\n"
                               << outcome.text;
  return json::parse(outcome.text, nullptr, /*allow_exceptions=*/false);
}

/// Processes compute, send and hold what threads do, to the last bit.
void expect_processes_equal_threads(const std::string& chapter,
                                    const std::string& options) {
  SCOPED_TRACE(chapter + " " + options);
  const json threads =
      deterministic_report_of(chapter, "--no-check " + options);
  const json processes =
      deterministic_report_of(chapter, "--backend gloo " + options);
  ASSERT_TRUE(threads.is_object() && processes.is_object());
  for (const char* claim : {"numbers", "bytes", "memory"}) {
    EXPECT_EQ(processes["claims"][claim], "passed");
  }
  EXPECT_EQ(processes["loss"], threads["loss"]);
  EXPECT_EQ(processes["bytes"], threads["bytes"]);
}

TEST(DataParallelPrograms, DdpOfProcessesTrainsAsOneDevice) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  for (const char* options :
       {"--world-size 2", "--world-size 3 --bucket-mb 0.1 --micro-batches 2",
        "--world-size 2 --model mlp --gradient-as-bucket-view"}) {
    expect_processes_equal_threads("02_ddp", options);
  }
}

TEST(DataParallelPrograms, ZeroAndFsdpOfProcessesTrainAsOneDevice) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  for (const char* options :
       {"--world-size 2 --strategy zero1 --reduce-bucket-size 20000",
        "--world-size 3 --strategy zero2 --clip 0.5",
        "--world-size 2 --strategy zero3 --persistence-threshold 100",
        "--world-size 3 --strategy fsdp --micro-batches 2",
        "--world-size 2 --strategy fsdp2",
        "--world-size 4 --strategy fsdp --sharding-strategy hybrid_shard "
        "--shard-size 2"}) {
    expect_processes_equal_threads("03_zero_fsdp", options);
  }
}

TEST(DataParallelPrograms, TheEngineOfProcessesTrainsAsOneDevice) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  for (const char* options :
       {R"(--world-size 2 --config '{"gradient_accumulation_steps": 2}')",
        R"(--world-size 3 --config '{"zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}')",
        R"(--world-size 2 --config '{"zero_optimization": {"stage": 3,
            "stage3_param_persistence_threshold": 100}}')",
        R"(--world-size 4 --config '{"zero_optimization": {"stage": 1},
            "pipeline": {"stages": 2}, "gradient_accumulation_steps": 3}')"}) {
    expect_processes_equal_threads("15_engine", options);
  }
}

// --- Ctrl-C -----------------------------------------------------------------

TEST(DataParallelPrograms, AnInterruptEndsTrainingAndWritesNothing) {
  for (const auto& [chapter, options] :
       std::vector<std::pair<std::string, std::string>>{
           {"01_data_parallel", ""},
           {"02_ddp", ""},
           {"03_zero_fsdp", "--strategy zero2 "},
           {"03_zero_fsdp", "--strategy fsdp "}}) {
    SCOPED_TRACE(chapter + " " + options);
    const TempFolder folder;
    const std::string save = folder / "weights.safetensors";
    // In the midst of training
    expect_end(run_until(chapter,
                         options +
                             "--world-size 2 --data random --steps 1000000 "
                             "--no-check --save " +
                             save,
                         folder / "log", 1, SIGINT),
               130, {"interrupted after", "weights.safetensors is as it was"});
    EXPECT_FALSE(std::filesystem::exists(save));
  }
}

}  // namespace
}  // namespace shardbook
