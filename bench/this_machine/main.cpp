// Predicts the wall time of the chapters on this machine, and measures it.
//
//   this_machine CHAPTERS_FOLDER [--device cuda] [--format json]
//
// 1. Calibrates: times operations and messages here, on models other than those
//    of step 2. Written as the cluster "this-machine".
// 2. Runs the chapters' programs with --cluster this-machine on one and two
//    cores, or on one GPU: each predicts its step time from shapes alone, then
//    measures it.

#include <fmt/format.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/this_machine/calibrate.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "core/check.h"
#include "core/text_file.h"
#include "sim/cluster.h"

namespace shardbook::this_machine {
namespace {

struct Run {
  std::string chapter;
  int ranks = 1;
  std::string variant = "";
  /// Options in addition to --variant and the shared ones.
  std::string options = "";

  std::string program(const std::string& folder) const {
    return folder + "/" + chapter + "/ch" + chapter;
  }
};

/// A GPT's token embedding would be on both sides of the cut, and calibration
/// has seen no ResNet as small as the chapter's own.
const std::string kMlpInHalves = " --model mlp --optimizer adamw";

const std::vector<Run> kRuns = {
    {"00_single_device", 1},
    {"01_data_parallel", 1},
    {"01_data_parallel", 2},
    {"02_ddp", 1},
    {"02_ddp", 2},
    {"03_zero_fsdp", 1},
    {"03_zero_fsdp", 2},
    {"04_model_parallel", 2, "model_parallel", kMlpInHalves},
    {"04_model_parallel", 2, "pipeline", kMlpInHalves},
    {"05_gpipe", 1},
    {"05_gpipe", 2},
    {"06_1f1b", 1},
    {"06_1f1b", 2}};

/// One rank: ranks that share a GPU slow each other down.
const std::string kGpt2 =
    " --model gpt2 --dtype bf16 --batch 8 --seq 1024 --device cuda";
const std::vector<Run> kGpuRuns = {
    {"00_single_device", 1, "", " --device cuda"},
    {"00_single_device", 1, "", kGpt2},
    {"02_ddp", 1, "", kGpt2},
    {"03_zero_fsdp", 1, "", kGpt2},
    {"05_gpipe", 1, "", kGpt2}};

/// The output of the program, run on the first `cores` cores that this process
/// may use.
std::string output_of(const std::string& command, int cores) {
  cpu_set_t all, some;
  sched_getaffinity(0, sizeof(all), &all);
  CPU_ZERO(&some);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&some) < cores; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &some);
  }
  // The program inherits the cores of the thread that starts it
  sched_setaffinity(0, sizeof(some), &some);
  std::FILE* const pipe = popen(command.c_str(), "r");
  sched_setaffinity(0, sizeof(all), &all);
  SB_CHECK(pipe != nullptr, "this-machine: no process can be started");
  std::string text;
  std::array<char, 4096> buffer;
  while (const std::size_t count =
             std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    text.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  SB_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
           "this-machine: ", command, " ended with status ",
           WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  return text;
}

/// Seconds of a step.
struct Times {
  double predicted_s = 0, measured_s = 0;
};

Times predict_and_measure(const std::string& folder, const Run& run) {
  std::string command = fmt::format(
      "'{}' --world-size {} --data random --steps 40 --no-check "
      "--cluster this-machine --format json{}",
      run.program(folder), run.ranks, run.options);
  if (!run.variant.empty()) command += " --variant " + run.variant;
  const auto json = nlohmann::json::parse(output_of(command, run.ranks));
  return {json["virtual"]["step_s"]["simulated"], json["wall"]["step_s"]};
}

double memory_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<double>(sysconf(_SC_PAGESIZE));
}

void calibrate(bool on_gpu) {
  const std::string file = sim::Cluster::this_machine_file();
  std::filesystem::create_directories(
      std::filesystem::path(file).parent_path());
  cpu_set_t all;
  sched_getaffinity(0, sizeof(all), &all);
  const std::string text =
      on_gpu ? measured_gpus_json()
             : cluster_json(measure_operations(), measure_all_reduce(),
                            std::max(2, CPU_COUNT(&all)), memory_bytes());
  const std::string temporary = file + ".new";
  write_text_file(temporary, text, temporary);
  std::filesystem::rename(temporary, file);
}

int run(const std::string& folder, bool as_json, bool on_gpu) {
  if (on_gpu && !why_no_gpu().empty()) {
    fmt::print("SKIPPED: {}\n", why_no_gpu());
    return 0;
  }
  calibrate(on_gpu);
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  double sum = 0;
  if (!as_json) {
    fmt::print("{:<36}{:>6}{:>12}{:>12}{:>9}\n", "chapter", "ranks",
               "predicted", "measured", "error");
  }
  for (const Run& each : on_gpu ? kGpuRuns : kRuns) {
    if (access(each.program(folder).c_str(), X_OK) != 0) continue;
    const auto [predicted_s, measured_s] = predict_and_measure(folder, each);
    const double error = predicted_s / measured_s - 1;
    sum += std::abs(error);
    json.push_back({{"chapter", each.chapter},
                    {"ranks", each.ranks},
                    {"variant", each.variant},
                    {"predicted_s", predicted_s},
                    {"measured_s", measured_s},
                    {"error", error}});
    if (!as_json) {
      fmt::print(
          "{:<36}{:>6}{:>9.2f} ms{:>9.2f} ms{:>+8.1f}%\n",
          each.chapter + (each.variant.empty() ? "" : " ") + each.variant,
          each.ranks, predicted_s * 1e3, measured_s * 1e3, error * 100);
    }
  }
  const auto count = json.size();
  SB_CHECK(count > 0, "this-machine: ", folder, " has no chapter programs");
  if (as_json) {
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print("mean error {:.1f} % of {} runs; calibration:\n{}\n",
               100 * sum / static_cast<double>(count), count,
               sim::Cluster::this_machine_file());
  }
  return 0;
}

}  // namespace
}  // namespace shardbook::this_machine

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    SB_CHECK(argc > 1, "give the folder of the chapters' programs");
    std::string device = "cpu", format = "text";
    CommandLine line("this_machine", "Predicted and measured wall time.");
    line.add("--device", &device, "where the chapters run", {"cpu", "cuda"});
    line.add("--format", &format, "of the results", {"text", "json"});
    line.parse(argc - 1, argv + 1);
    return this_machine::run(argv[1], format == "json", device == "cuda");
  });
}
