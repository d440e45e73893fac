// Every chapter's claims with --device cuda: ranks that share one GPU, and with
// NCCL as many ranks as there are GPUs.
//
// SHARDBOOK_GPU_SUITE=short runs the same with fewer cases, steps and tokens:
// for the emulated GPU, which the tests of every change have.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/gpus.h"
#include "tests/cli/command.h"
#include "tests/support/files.h"

namespace shardbook {
namespace {

using nlohmann::json;

bool is_short() {
  const char* size = std::getenv("SHARDBOOK_GPU_SUITE");
  return size != nullptr && std::string(size) == "short";
}

/// The programs lie where the build has them, also in a pack.
std::string root() {
  const std::filesystem::path self =
      std::filesystem::read_symlink("/proc/self/exe");
  return self.parent_path().parent_path().parent_path().string();
}

struct RunOutcome : Outcome {
  std::string errors;
};

RunOutcome run(const std::string& chapter, const std::string& options) {
  const std::string errors =
      testing::TempDir() + "gpu-" + std::to_string(getpid());
  const std::string command = "timeout -k 10 300 '" + root() + "/chapters/" +
                              chapter + "/ch" + chapter + "' --format json " +
                              options + " 2>'" + errors + "' </dev/null";
  RunOutcome outcome{run_command(command), read_bytes(errors)};
  std::filesystem::remove(errors);
  return outcome;
}

/// The sizes of a run; in the short form an MLP stands for all models.
std::string sizes() {
  return is_short() ? " --model mlp --steps 1 --batch 4 --seq 4" : " --steps 8";
}

/// The same with a GPT in both forms.
std::string gpt_sizes() {
  return is_short() ? " --steps 2 --batch 4 --seq 8" : sizes();
}

/// The number of ranks that share a GPU here.
std::string shared() {
  return is_short() ? "--world-size 2 " : "--world-size 4 ";
}

json report_of(const std::string& chapter, const std::string& options) {
  const RunOutcome outcome = run(chapter, options);
  EXPECT_EQ(outcome.status, 0) << chapter << " " << options << "\n"
                               << outcome.errors << outcome.text;
  return json::parse(outcome.text, nullptr, /*allow_exceptions=*/false);
}

/// Numbers, bytes and memory are as predicted, and the step took time.
void expect_claims(const std::string& chapter, const std::string& options) {
  SCOPED_TRACE(chapter + " " + options);
  const json report = report_of(chapter, options);
  ASSERT_TRUE(report.is_object());
  for (const json& device : report["devices"]) {
    EXPECT_EQ(device.get<std::string>().rfind("cuda:", 0), 0u) << device;
  }
  for (const char* claim : {"numbers", "bytes", "memory"}) {
    EXPECT_EQ(report["claims"][claim], "passed") << claim << "\n" << report;
  }
  EXPECT_GT(report["wall"]["step_s"], 0);
}

struct Case {
  std::string chapter, options;
  bool in_short_form = true;
};

class GpuChapters : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  /// f32 and bf16, and dropout, whose masks do not depend on the sharding.
  void expect_all(const std::vector<Case>& cases,
                  const std::string& sizes = shardbook::sizes()) const {
    for (const Case& each : cases) {
      if (is_short() && !each.in_short_form) continue;
      const std::string base = "--device cuda " + each.options + sizes;
      expect_claims(each.chapter, base);
      if (!is_short()) expect_claims(each.chapter, base + " --dtype bf16");
    }
  }
};

TEST_F(GpuChapters, OneDeviceKeepsItsClaims) {
  expect_all({{"00_single_device", ""},
              {"00_single_device", "--micro-batches 4 --recompute", false},
              {"00_single_device", "--dropout 0.1 --optimizer adam", false}},
             gpt_sizes());
  expect_all({{"00_single_device", "--micro-batches 4 --model mlp", false}});
  expect_claims(
      "00_single_device",
      "--device cuda --dtype bf16 --master-weights --recompute" + gpt_sizes());
  if (is_short()) return;
  expect_claims("00_single_device", "--device cuda --dtype f16" + sizes());
}

TEST_F(GpuChapters, OneDeviceLaunchesGraphs) {
  const std::string graphs = "--device cuda --cuda-graphs ";
  // The third step launches what the second recorded
  expect_claims("00_single_device",
                graphs + (is_short() ? "--model mlp --steps 3 --batch 3 "
                                       "--seq 2 --micro-batches 2"
                                     : "--micro-batches 5" + sizes()));
  for (const std::string bad :
       {"--cuda-graphs", "--device cuda --cuda-graphs --dropout 0.1",
        "--device cuda --cuda-graphs --model resnet18"}) {
    const RunOutcome outcome = run("00_single_device", bad);
    EXPECT_EQ(outcome.status, 2) << bad;
    EXPECT_NE(outcome.errors.find("--cuda-graphs"), std::string::npos)
        << outcome.errors;
  }
  if (is_short()) return;
  expect_claims("00_single_device",
                graphs + "--dtype bf16 --master-weights --recompute" + sizes());
  expect_claims("00_single_device", graphs + "--dtype f16" + sizes());
}

TEST_F(GpuChapters, RanksThatShareAGpuSplitTheBatch) {
  expect_all({{"01_data_parallel", shared()},
              {"02_ddp", shared() + "--clip 1"},
              {"02_ddp", shared() + "--micro-batches 3 --dropout 0.1", false},
              {"02_ddp", shared() + "--find-unused-parameters", false},
              {"02_ddp", "--world-size 2 --static-graph", false}});
}

TEST_F(GpuChapters, RanksThatShareAGpuShardTheirState) {
  const std::string ranks = shared() + "--strategy ";
  expect_all({{"03_zero_fsdp", ranks + "zero1", false},
              {"03_zero_fsdp", ranks + "zero2"},
              {"03_zero_fsdp", ranks + "zero3"},
              {"03_zero_fsdp", ranks + "zero3 --cpu-offload", false},
              {"03_zero_fsdp", ranks + "fsdp"},
              {"03_zero_fsdp", ranks + "fsdp --cpu-offload", false},
              {"03_zero_fsdp", ranks + "fsdp2", false}});
}

TEST_F(GpuChapters, DevicesThatShareAGpuSplitTheLayers) {
  const std::string images =
      is_short() ? "--device cuda --steps 1 --batch 4 --image-size 32 "
                   "--split-size 2 --variant "
                 : "--device cuda --variant ";
  for (const char* variant : {"single", "model_parallel", "pipeline"}) {
    if (is_short() && variant != std::string("pipeline")) continue;
    expect_claims("04_model_parallel", images + variant);
  }
}

TEST_F(GpuChapters, RanksThatShareAGpuAreStages) {
  const std::string ranks = shared() + "--schedule ";
  expect_all(
      {{"05_gpipe", shared() + "--micro-batches 4"},
       {"05_gpipe", shared() + "--long-skips --dropout 0.1", false},
       {"06_1f1b", ranks + "1f1b"},
       {"06_1f1b", ranks + "zb-h1 --clip 1", false},
       {"06_1f1b", "--world-size 2 --schedule interleaved --chunks 2", false},
       {"06_1f1b", ranks + "dualpipe", false},
       {"06_1f1b", ranks + "pipedream", false}});
}

TEST_F(GpuChapters, RanksThatShareAGpuShareEveryLayer) {
  expect_all({{"07_tensor_parallel", shared()},
              {"07_tensor_parallel", shared() + "--dropout 0.1", false},
              {"08_tensor_parallel_2d", "--world-size 4", false},
              {"09_tensor_parallel_2p5d", "--world-size 8 --depth 2", false},
              {"10_tensor_parallel_3d", "--world-size 8", false},
              {"11_dtensor", "--world-size 4 --mesh 2x2", false}},
             gpt_sizes());
}

TEST_F(GpuChapters, RanksThatShareAGpuShareEverySample) {
  const std::string ranks = shared() + "--kind ";
  expect_all({{"12_sequence_parallel", ranks + "ring"},
              {"12_sequence_parallel", ranks + "ring --layout zigzag", false},
              {"12_sequence_parallel", ranks + "ulysses", false},
              {"12_sequence_parallel", ranks + "rsa", false},
              {"12_sequence_parallel", ranks + "megatron", false}},
             gpt_sizes());
}

TEST_F(GpuChapters, RanksThatShareAGpuShareAMesh) {
  expect_all(
      {{"14_hybrid_3d", "--world-size 4 --tp 2 --pp 2"},
       {"14_hybrid_3d", "--world-size 4 --pp 2 --zero-stage 1", false},
       {"14_hybrid_3d",
        "--world-size 4 --pp 2 --overlap-grad-reduce --bucket-bytes 1MiB",
        false},
       {"14_hybrid_3d", "--world-size 4 --tp 2 --zero-stage 3", false},
       {"14_hybrid_3d", "--world-size 4 --cp 2 --pp 2 --dtype f16", false}},
      gpt_sizes());
}

TEST_F(GpuChapters, RanksThatShareAGpuShareExperts) {
  const std::string ranks = shared() + "--num-experts 4 ";
  expect_all({{"13_moe", ranks},
              {"13_moe", ranks + "--top-k 2 --zero-stage 2", false},
              {"13_moe", ranks + "--dropless --noise jitter", false}},
             gpt_sizes());
}

TEST_F(GpuChapters, NcclConnectsAGpuForEachRank) {
  if (num_gpus() < 2 && !is_short()) {
    GTEST_SKIP() << "a group of one rank moves nothing; give 2 GPUs";
  }
  const std::string all = "--backend nccl --world-size " +
                          std::to_string(std::min(num_gpus(), 4)) + " ";
  expect_all({{"02_ddp", all},
              {"03_zero_fsdp", all + "--strategy zero2", false},
              {"03_zero_fsdp", all + "--strategy fsdp"},
              {"05_gpipe", all, false},
              {"06_1f1b", all, false}});
}

// The claims compare GPUs with a GPU. This compares a GPU with the CPU: other
// kernels, whose sums are rounded in another order.
TEST_F(GpuChapters, AGpuTrainsAsTheCpuDoes) {
  struct Tolerance {
    const char* dtype;
    double first;  ///< relative, of the first loss: one forward
    double last;   ///< after the steps, as in chapters/common/run/parity.h
  };
  for (const Tolerance& each :
       {Tolerance{"f32", 1e-5, 1e-3}, Tolerance{"bf16", 1e-2, 5e-2}}) {
    const std::string options =
        std::string("--no-check --dtype ") + each.dtype + gpt_sizes();
    const json cpu = report_of("00_single_device", options);
    const json gpu = report_of("00_single_device", options + " --device cuda");
    ASSERT_TRUE(cpu.is_object() && gpu.is_object());
    for (const auto& [when, tolerance] :
         {std::pair{"first", each.first}, {"last", each.last}}) {
      const double there = cpu["loss"][when], here = gpu["loss"][when];
      EXPECT_NEAR(here, there, tolerance * std::abs(there))
          << when << " loss in " << each.dtype;
    }
    EXPECT_EQ(cpu["peak_memory"][0]["parameter"],
              gpu["peak_memory"][0]["parameter"]);
  }
}

// Weights that one device saves load on another.
TEST_F(GpuChapters, FilesDoNotDependOnTheDevice) {
  const std::string file =
      testing::TempDir() + "gpu-" + std::to_string(getpid()) + ".safetensors";
  report_of("02_ddp",
            "--device cuda --world-size 2 --no-check --save " + file + sizes());
  const std::string loaded = "--no-check --load " + file + sizes();
  const json cpu = report_of("00_single_device", loaded);
  const json gpu = report_of("00_single_device", loaded + " --device cuda");
  std::filesystem::remove(file);
  ASSERT_TRUE(cpu.is_object() && gpu.is_object());
  const double there = cpu["loss"]["first"];
  EXPECT_NEAR(gpu["loss"]["first"].get<double>(), there, 1e-5 * there);
}

TEST_F(GpuChapters, WhatThisMachineCannotIsOneSentence) {
  const std::string more = std::to_string(num_gpus() + 1);
  for (const auto& [options, sentence] :
       {std::pair{std::string("--backend gloo"),
                  "it moves tensors of the CPU only"},
        {"--backend nccl --world-size " + more, "ranks need"},
        {std::string("--backend sim"), "has shapes and no device"}}) {
    const RunOutcome outcome = run("02_ddp", "--device cuda " + options);
    EXPECT_EQ(outcome.status, 2) << options << "\n" << outcome.errors;
    EXPECT_NE(outcome.errors.find(sentence), std::string::npos)
        << outcome.errors;
  }
}

}  // namespace
}  // namespace shardbook
