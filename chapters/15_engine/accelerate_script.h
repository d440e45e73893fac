#pragma once

// The program `accelerate`: its command line, the objects that its script makes
// for one process, and the run of that process, which judges the script.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/15_engine/accelerator.h"
#include "chapters/common/run/training.h"

namespace shardbook::accelerate {

/// Options under the names that Accelerate's scripts and plugins give them.
struct ScriptOptions {
  Options run;  ///< ranks, model, data, optimizer
  AcceleratorOptions accelerator;
  std::string plugin = "ddp";
  FullyShardedDataParallelPlugin fsdp;
  DeepSpeedPlugin deepspeed;
  MegatronLMPlugin megatron;
  std::map<std::string, std::vector<std::string>>
      fields;  ///< options by plugin
  std::int64_t num_samples = 48;
  std::int64_t eval_samples = 18;
  std::int64_t batch_size = 4;
  bool shuffle = false;
  bool drop_last = false;
  std::int64_t epochs = 1;
  std::int64_t max_train_steps = 0;  ///< updates; 0: those of all epochs
  double max_grad_norm = 1;          ///< infinite: no clipping
  /// Of --hf-ds-config: then the script has none.
  bool config_has_optimizer = false, config_has_scheduler = false;
  std::int64_t checkpointing_steps = 0;  ///< updates; 0: no checkpoints
  std::string output_dir, resume_from_checkpoint;
};

void add_options(CommandLine& line, ScriptOptions& script);
/// Checks the options and fills in the plugin and the number of updates. Throws
/// Error that names the option, its value and what is allowed.
void check_script(const CommandLine& line, ScriptOptions& script);

/// Ranks that do not share a model.
int data_parallel_size(const ScriptOptions& script);
/// The samples that all processes read at once, in the order of an epoch.
std::vector<std::vector<std::int64_t>> rounds_of(const ScriptOptions& script,
                                                 std::int64_t epoch);
/// Updates of an epoch; the last window may be short.
std::int64_t updates_per_epoch(const ScriptOptions& script);
/// Updates before the loader's place.
std::int64_t updates_done(const ScriptOptions& script,
                          const PreparedLoader& loader);

/// The objects of a script for one process.
struct Objects {
  LoadedModel loaded;
  engine::OptimizerConfig optimizer;
  DataLoader loader, eval_loader;
  Scheduler scheduler;
};
Objects make_objects(const ScriptOptions& script);

/// The folder of a checkpoint after so many updates; empty for none.
std::string checkpoint_of(const ScriptOptions& script, std::int64_t updates);

/// The results of the loop on one rank. The main process prints them.
struct History {
  std::int64_t first_update = 0;
  std::vector<double> losses = {}, norms = {};  ///< by update
  std::vector<double> evaluated = {};           ///< losses by sample
  std::vector<NamedTensor> weights = {};
  int threads = 0;  ///< cores of this rank

  /// `loss` is the sum over the window's batches.
  void add_update(const ScriptOptions& script, Accelerator& acc, double loss,
                  double norm, double rate, bool was_skipped);
  /// Losses of the evaluation, one for each sample.
  void add_evaluated(const Tensor& losses);
  void finish(Accelerator& acc, std::vector<NamedTensor> all_weights);
};

/// The loss of a batch, once for each of its samples.
Tensor loss_by_sample(const Tensor& loss, const Batch& batch);

/// Runs `body` on every rank, and compares rank 0's results with a run of one
/// process, which reads the samples of all. Returns the exit status.
int run_script(const ScriptOptions& script,
               const std::function<History(ProcessGroup& world)>& body);

}  // namespace shardbook::accelerate
