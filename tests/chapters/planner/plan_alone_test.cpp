// The planner that is linked without oneDNN, xsimd, Boost, sockets and processes
// answers as the program does.

#include <gtest/gtest.h>

#include <string>

#include "tests/cli/programs.h"

namespace shardbook {
namespace {

constexpr char kAlone[] = "chapters/planner/plan_alone";

// Each way through the planner: degrees, schedules, recomputation, offload,
// experts' hosts, the hybrid chapter on shapes, files, and refusals.
const char* const kRequests[] = {
    "--model gpt-1.3b --world-size 1 --batch 64 --top 3",
    "--model gpt-1.3b --world-size 8 --batch 64 --no-prune --micro-batch 1",
    "--model gpt-1.3b --world-size 1 --batch 16 --offload",
    "--model gpt-13b --nodes 1 --batch 64 --tp 4 --pp 2",
    "--model gpt-13b --nodes 2 --batch 128 --tp 4",
    "--model gpt-13b --nodes 2 --batch 128 --dropout 0.1 --zero-stage 1 --pp 2",
    "--model gpt-13b --nodes 8 --batch 512 --cluster dgx-h100 --dtype f16 --tp "
    "8",
    "--model gpt-13b --nodes 4 --batch 128 --cluster selene --seq 1024 --tp 2 "
    "--pp 2",
    "--model gpt-70b --nodes 8 --batch 256 --tp 8 --recompute attention",
    "--model gpt-70b --nodes 8 --batch 256 --tp 8 --schedule interleaved",
    "--model gpt-70b --nodes 8 --batch 256 --tp 8 --schedule zb-h1",
    "--model gpt-175b --nodes 8 --batch 512 --recompute blocks --tp 8",
    "--model gpt2-xl --world-size 4 --batch 64 --cluster kaggle-t4x2 --dtype "
    "f32",
    "--model gpt2-xl --world-size 2 --batch 16 --cluster kaggle-t4x2 --dtype "
    "f16",
    "--model gpt2-medium --world-size 8 --batch 64 --cluster textbook",
    "--model gpt2-medium --world-size 8 --batch 64 --device-memory 4GiB --tp 1",
    "--model gpt2 --world-size 2 --batch 8 --cp 2",
    "--model gpt2 --world-size 2 --tp 2 --batch 8 --confirm",
    "--model gpt2 --world-size 4 --pp 4 --batch 8 --confirm",
    "--model llama-3.2-1b --nodes 1 --batch 64 --seq 2048 --top 2",
    "--model '{\"model_type\": \"gemma2\"}' --nodes 1 --batch 16 --seq 4096 "
    "--tp 1 --explain",
    "--model resnet50 --world-size 4 --batch 8",
    "--model gpt2 --world-size 4 --batch 8 --tp 3",
    "--model gpt2 --world-size 4 --batch 8 --by-strategy",
};

TEST(PlanAlone, AnswersAsTheProgram) {
  for (const std::string request : kRequests) {
    const Outcome program = run_program("chapters/planner/shardbook_plan",
                                        request + " --format json");
    const Outcome alone = run_program(kAlone, request + " --format json");
    EXPECT_EQ(alone.status, program.status) << request;
    EXPECT_EQ(alone.text, program.text) << request;
    EXPECT_FALSE(program.text.empty()) << request;
  }
}

TEST(PlanAlone, NeedsNoLibraryOfTheCpuNoBoostAndNoSockets) {
  const Outcome undefined =
      run_command("nm -DuC '" SHARDBOOK_BUILD "/" + std::string(kAlone) + "'");
  ASSERT_EQ(undefined.status, 0);
  ASSERT_NE(undefined.text.find("swapcontext"), std::string::npos);
  for (const char* name : {"dnnl", "boost::", "gloo::", " socket@", " connect@",
                           " bind@", " listen@", " fork@", " execve@"}) {
    EXPECT_EQ(undefined.text.find(name), std::string::npos) << name;
  }
  const Outcome needed = run_command("readelf -d '" SHARDBOOK_BUILD "/" +
                                     std::string(kAlone) + "' | grep NEEDED");
  for (const char* name : {"dnnl", "boost", "gloo", "shardbook"}) {
    EXPECT_EQ(needed.text.find(name), std::string::npos) << needed.text;
  }
}

}  // namespace
}  // namespace shardbook
