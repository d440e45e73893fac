// Chapters with ranks that are processes, and data-parallel ones interrupted.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <vector>

#include "tests/cli/programs.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

struct Processes {
  std::string chapter, options;
};

// Processes compute, send and hold what threads do, to the last bit.
TEST(DataParallelPrograms, ProcessesTrainAsOneDeviceAndAsThreads) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  for (const auto& [chapter, options] : std::vector<Processes>{
           {"02_ddp", "--world-size 2"},
           {"02_ddp", "--world-size 3 --bucket-mb 0.1 --micro-batches 2"},
           {"02_ddp", "--world-size 2 --model mlp --gradient-as-bucket-view"},
           {"03_zero_fsdp",
            "--world-size 2 --strategy zero1 --reduce-bucket-size 20000"},
           {"03_zero_fsdp", "--world-size 3 --strategy zero2 --clip 0.5"},
           {"03_zero_fsdp",
            "--world-size 2 --strategy zero3 --persistence-threshold 100"},
           {"03_zero_fsdp", "--world-size 3 --strategy fsdp --micro-batches 2"},
           {"03_zero_fsdp", "--world-size 2 --strategy fsdp2"},
           {"03_zero_fsdp",
            "--world-size 4 --strategy fsdp --sharding-strategy hybrid_shard "
            "--shard-size 2"},
           {"05_gpipe", "--world-size 3"},
           {"05_gpipe", "--world-size 4 --long-skips --recompute always"},
           {"05_gpipe", "--world-size 2 --model mlp --micro-batches 5"},
           {"06_1f1b", "--world-size 3 --schedule zb-h1 --recompute"},
           {"06_1f1b", "--world-size 2 --schedule dualpipe --model mlp"},
           {"06_1f1b", "--world-size 2 --schedule interleaved --chunks 3"},
           {"06_1f1b", "--world-size 3 --schedule pipedream --replicas 2,1"},
           {"06_1f1b",
            "--world-size 3 --schedule zb-h2 --post-validation --clip 0.5"},
           {"15_engine",
            R"(--world-size 2 --config '{"gradient_accumulation_steps": 2}')"},
           {"15_engine",
            R"(--world-size 3 --config '{"zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}')"},
           {"15_engine",
            R"(--world-size 2 --config '{"zero_optimization": {"stage": 3,
            "stage3_param_persistence_threshold": 100}}')"},
           {"15_engine",
            R"(--world-size 4 --config '{"zero_optimization": {"stage": 1},
            "pipeline": {"stages": 2}, "gradient_accumulation_steps": 3}')"}}) {
    SCOPED_TRACE(chapter + " " + options);
    const auto report_of = [&, &chapter = chapter,
                            &options = options](const std::string& world) {
      return json_of(run(chapter,
                         "--format json --data random --steps 4 --batch 12 "
                         "--seq 8 --deterministic " +
                             world + options));
    };
    const json threads = report_of("--no-check ");
    const json processes = report_of("--backend gloo ");
    expect_claims(processes);
    EXPECT_EQ(processes["loss"], threads["loss"]);
    EXPECT_EQ(processes["bytes"], threads["bytes"]);
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
