#pragma once

// The command line that every chapter shares.
//
//   int main(int argc, char** argv) {
//     return chapter_main([&] {
//       Options options;
//       CommandLine line("ch02_ddp", "DistributedDataParallel");
//       add_shared_options(line, options);
//       line.add("--bucket-mb", &bucket_mb, "size limit of a bucket", 0.001);
//       line.parse(argc, argv);
//       ...
//       return report(...);
//     });
//   }
//
// Bad input is one clear sentence on stderr and exit status 2.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/model_options.h"
#include "chapters/common/run/command_line.h"
#include "core/dtype.h"
#include "core/optim.h"

namespace shardbook {

struct LaunchOptions;  // comm/launch.h

/// What starts the ranks: read by worlds.h and comm/launch.h.
struct WorldOptions {
  int world_size = 1;
  std::string backend = "threads";
  std::string device = "cpu";  ///< or "cuda"
  std::int64_t device_memory_bytes = 0;
  /// CUDA: products of f32 may round their operands to TF32, 10 bits.
  bool tf32 = false;
  bool deterministic = false;
  /// threads: sends wait for their receiver, however small (comm/launch.h).
  bool rendezvous_sends = false;
  double timeout_s = 300;
  std::string rendezvous;
  std::string network_interface;
  /// The cluster of virtual time: a preset, a FILE.json, or "none".
  std::string cluster = "dgx-a100";
  /// sim: ranks that do the same work are run once.
  bool fold = true;
};

/// The steps and their updates: read by training.h and checkpoints.h.
struct TrainingOptions {
  std::int64_t steps = 60;
  std::string optimizer = "adamw";
  OptimizerOptions optimizer_options;
  std::string lr_schedule = "constant";
  std::int64_t warmup = 0;
  /// The learning rate by number of updates, in place of lr_schedule: steps that
  /// f16 skips do not count. Set by chapters, not on the command line.
  LrSchedule rate;
  double clip = 0;  ///< largest gradient norm; 0: no clipping
  /// Folder of checkpoints (checkpoints.h); empty: none.
  std::string checkpoint;
  std::int64_t checkpoint_every = 0;  ///< steps; 0: at the end only
  bool resume = false;
  /// Steps done before, according to the checkpoint that the run continues;
  /// `steps` counts those to come. Set by the shell, not on the command line.
  std::int64_t first_step = 0;
  /// Training begins with weights that differ in their last bit (parity.h).
  bool nudged = false;
};

/// What a run writes: read by the shell (program.h, report.h, trace.h).
struct OutputOptions {
  bool check = true;
  std::string format = "text";
  std::string report;  ///< a file for the report as JSON
  std::string log;
  std::string logits;
  std::string save;
  /// Names of a ResNet's weights in `save`: "torchvision" or "transformers".
  std::string save_names = "torchvision";
  /// --save also writes weights that are not finite.
  bool save_non_finite = false;
  std::string trace;
  /// The timeline of virtual time: "text", a FILE.json, or empty.
  std::string timeline;
};

/// The options of all chapters; --help-all prints their names and meaning.
struct Options : WorldOptions, ModelOptions, TrainingOptions, OutputOptions {
  std::string chapter;  ///< "02_ddp", or the name of another program
  /// A run on shapes ahead of the one with data: it does the same work, and
  /// prints and writes nothing. Set by the shell, not on the command line.
  bool is_prediction = false;
  /// The program's options that --resume compares (run_identity.h), with their
  /// values. Set by the shell, from the command line; the engine adds its config.
  std::vector<ComparedOption> compared;
  /// Every option of the program with its value; ranks compare them when they
  /// meet.
  std::vector<std::pair<std::string, std::string>> effective;
};

/// Adds the shared options, and reads the chapter from the program's name
/// ("ch02_ddp", or a name of your own). `backends` are those that the chapter knows;
/// `no_other` is the reason for refusing others.
void add_shared_options(CommandLine& line, Options& options,
                        const std::vector<std::string>& backends = {"threads",
                                                                    "gloo",
                                                                    "nccl",
                                                                    "sim"},
                        const std::string& no_other = "");
/// --software: joined to `cluster`, which a --cluster before it sets ("selene" to
/// "selene+megatron-lm-2022"); its operations, and what it costs the host.
void add_software(CommandLine& line, std::string& cluster);
/// Accepts --local_rank (or --local-rank) R, which DeepSpeed's launcher and
/// torch.distributed.launch add beside the variable LOCAL_RANK. The two must
/// agree.
void accept_local_rank(CommandLine& line);
/// Checks options against each other, that this machine has the devices, and
/// that the files which the run writes at its end can be written.
void check_options(const Options& options);
/// For chapters whose claims hold for language models only: throws Error with
/// `reason` where --model reads images.
void refuse_image_models(const Options& options, const std::string& reason);
/// The reason of data-parallel chapters.
extern const char* const kBatchNormDiffers;
/// The options that run_ranks needs.
LaunchOptions launch_options(const Options& options);

}  // namespace shardbook
