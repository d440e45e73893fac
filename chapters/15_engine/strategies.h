#pragma once

// The registry of chapters, by the config that each can train.
//
//   Choice choice = choose(options, config);    // or an Error with the reason
//   DeviceMesh mesh(world, choice.topology);
//   const auto strategy = choice.make(options, mesh);
//
//   zero_optimization.stage 0        02_ddp
//   .stage 1, 2, 3                   03_zero_fsdp, ZeRO
//   .stage 3, sharding "fsdp"        03_zero_fsdp, FSDP
//   experts                          13_moe, with stages 0 to 2 of ZeRO
//   tensor_parallel 2d, 2.5d, 3d     08, 09, 10
//   pipelines, tensor or context     14_hybrid_3d, with experts or without
//   parallelism

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/15_engine/deepspeed_config.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

namespace shardbook::engine {

/// Options as given on the command line: name and value.
using Given = std::vector<std::pair<std::string, std::string>>;

struct Choice {
  std::string name;     ///< "ZeRO-2"
  std::string chapter;  ///< "03_zero_fsdp"
  int dp = 1;           ///< data-parallel ranks
  BatchSizes sizes;
  double clip = 0;  ///< the config's, or --clip
  Topology topology = Topology({"dp"}, {1});
  FoldClass fold_class = one_class;
  std::function<std::unique_ptr<Strategy>(const Options&, DeviceMesh&)> make =
      {};
  /// The same training on one device.
  std::function<ReferenceRun(const Options&)> reference = {};
};

/// Reads a config, a file or a text that begins with '{'. Options and the model fill
/// values "auto" as Hugging Face's Trainer does; a remark names each of them.
DeepSpeedConfig read_config(const std::string& file, const Options& options,
                            const Given& given);
/// Fills the options from the config: batch, optimizer, schedule, clipping,
/// dtype, and what --resume compares. A value given only once holds, and --clip overrides the config's;
/// throws Error that names option and key where they conflict.
void apply_config(const DeepSpeedConfig& config, int dp, const Given& given,
                  Options& options);
/// What --resume compares of a config for a training in `dtype`: keys under the
/// names of options where chapters have them ("--top-k"), else under their paths.
/// Keys that apply_config takes into options are left out.
std::vector<ComparedOption> compared_keys(const DeepSpeedConfig& config,
                                          DType dtype);
/// Data-parallel ranks: the world without the ranks that share a model. Throws
/// Error where it does not divide.
int data_parallel_ranks(const Options& options, const DeepSpeedConfig& config);
/// The chapter for a config whose values are in the options. Throws Error that
/// names the keys that conflict or that the chapter does not support.
Choice choose(const Options& options, const DeepSpeedConfig& config);
/// Which strategy, which sizes, and the config's remarks: a line each.
std::string describe(const Choice& choice, const DeepSpeedConfig& config);

}  // namespace shardbook::engine
