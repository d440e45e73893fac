#pragma once

// The other door to the engine: a script for one process, and one call that
// hands its objects to any library of the book.
//
//   accelerate::Accelerator acc(options, world);
//   auto [model, opt, loader, sched] =
//       acc.prepare(gpt, adamw, {data, /*batch_size=*/4}, {schedule});
//   while (const auto batch = loader.next()) {
//     const auto micro_step = acc.accumulate(model);
//     const Tensor loss = model.loss(*batch);
//     acc.backward(loss);
//     if (acc.sync_gradients()) {
//       acc.clip_grad_norm_(model.parameters(), 1.0);
//     }
//     opt.step();
//     sched.step();
//     opt.zero_grad();
//   }
//
// The loop stays as it is when options.plugin changes: DDP, FSDP, the engine,
// or the hybrid chapter's tensor and pipeline parallelism. The losses stay the
// same, too.
//
// - backward divides the loss by gradient_accumulation_steps. User code must
//   not divide as well.
// - The window of accumulation ends after gradient_accumulation_steps batches,
//   or at the last batch of the loader. A short last window is divided by the
//   full number all the same, so its samples count less.
// - Between windows, step, zero_grad and clip_grad_norm_ do nothing, so the
//   loop may call them after every batch.
//
// All ranks make the same calls in the same order. Accelerate's rows for TPUs
// are out of scope: this book runs on CPUs and NVIDIA GPUs.
//
// huggingface/accelerate, src/accelerate/{accelerator,optimizer,scheduler,
// data_loader}.py.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/15_engine/plugins.h"
#include "chapters/15_engine/prepared.h"
#include "chapters/common/run/command_line.h"
#include "comm/process_group.h"

namespace shardbook::accelerate {

struct AcceleratorOptions {
  std::string mixed_precision = "no";  ///< "no", "bf16" or "fp16"
  std::int64_t gradient_accumulation_steps = 1;
  /// Refuses ranks that were started on a GPU.
  bool cpu = false;
  /// Loaders: batch_size counts the samples of all processes together.
  bool split_batches = false;
  bool even_batches = true;
  Plugin plugin = DistributedDataParallelPlugin{};
  /// What save_state keeps of the script and load_state compares
  /// (run_identity.h); empty: nothing is compared.
  std::vector<ComparedOption> compared = {};
};

/// The scheduler of a script: one that it makes itself, or (null) the one in
/// the config of a DeepSpeedPlugin, with these for its "auto" numbers.
struct Scheduler {
  std::shared_ptr<engine::LrScheduler> native = {};
  std::int64_t warmup_num_steps = 0;
  std::int64_t total_num_steps = 0;
};

/// The objects that a script trains with. Wrappers replace a model's tensors,
/// so `prepare` creates the optimizer after them.
struct Prepared {
  PreparedModel model;
  PreparedOptimizer optimizer;
  PreparedLoader loader;
  PreparedScheduler scheduler;
};

/// The scope of one batch: its backward sends gradients if it ends a window.
class [[nodiscard]] Accumulate {
 public:
  explicit Accumulate(std::shared_ptr<internal::Loop> loop);
  ~Accumulate();
  Accumulate(const Accumulate&) = delete;
  Accumulate& operator=(const Accumulate&) = delete;

 private:
  std::shared_ptr<internal::Loop> loop_;
};

class Accelerator {
 public:
  /// Throws Error for options that are not known.
  Accelerator(const AcceleratorOptions& options, ProcessGroup& world);

  /// Wraps the model as the plugin says, deals out the loader's batches, and
  /// makes the optimizer. `optimizer` without a type means the one in the
  /// config of a DeepSpeedPlugin. Every rank begins with the first one's
  /// weights. Throws Error that names the fields, keys or arguments that
  /// conflict. Call it once. Collective.
  Prepared prepare(Module& model, const engine::OptimizerConfig& optimizer,
                   const DataLoader& loader, const Scheduler& scheduler = {});
  /// Another loader, such as one for evaluation. Its ends do not end windows.
  PreparedLoader prepare(const DataLoader& loader);

  /// Begins a micro-step; keep the result until its backward has run.
  Accumulate accumulate(PreparedModel& model);
  /// Whether the running (or last) micro-step ends a window.
  bool sync_gradients() const;
  /// Adds the gradient of loss / gradient_accumulation_steps.
  void backward(const Tensor& loss);
  /// The norm of the whole gradient, before it is clipped to max_norm; nothing
  /// between windows, whose gradients are not complete. For DeepSpeedPlugin,
  /// returns the norm only: its config clips. `parameters` are the model's.
  std::optional<double> clip_grad_norm_(const Tensors& parameters,
                                        double max_norm);

  int num_processes() const { return world_.size(); }
  int process_index() const { return world_.rank(); }
  bool is_main_process() const { return world_.rank() == 0; }
  /// The device of this rank.
  const Device& device() const;
  /// A line on stdout, from the main process only.
  void print(const std::string& line) const;
  void wait_for_everyone() { world_.barrier("wait_for_everyone"); }

  /// The data-parallel ranks' tensors [n, ...] end to end: [d n, ...]; numbers
  /// give [d]. Collective.
  Tensor gather(const Tensor& tensor);
  /// The same without the samples that the loader has repeated in its last
  /// round.
  Tensor gather_for_metrics(const Tensor& tensor);
  /// "sum" or "mean" over the data-parallel ranks. Collective.
  Tensor reduce(const Tensor& tensor, const std::string& reduction = "sum");

  /// The script's own model. Its tensors are shards where the plugin cuts them;
  /// throws Error for MegatronLMPlugin, which has built another one.
  Module& unwrap_model(PreparedModel& model);
  /// All parameters and buffers, whole, on the main process. Collective.
  std::vector<NamedTensor> get_state_dict(PreparedModel& model);

  /// Saves model, optimizer, scheduler, loss scale and the loader's place in
  /// FOLDER. Throws Error inside a window. Collective.
  void save_state(const std::string& folder);
  /// Resumes from FOLDER, written by any number of ranks under any plugin
  /// (fp16: by one with the same kind of loss scale). The loader continues
  /// after the samples that were read. Throws Error that names each of
  /// `AcceleratorOptions::compared` that differs. Collective.
  void load_state(const std::string& folder);

 private:
  std::unique_ptr<internal::Backend> make_backend(
      Module& model, const engine::OptimizerConfig& optimizer,
      const DataLoader& loader, const Scheduler& scheduler);
  ShardOptions shard_options(const DataLoader& loader) const;
  PreparedLoader shard(const DataLoader& loader, const ProcessGroup& group);
  ProcessGroup& data_group() const;
  internal::Backend& backend(const char* call) const;

  const AcceleratorOptions options_;
  ProcessGroup& world_;
  std::shared_ptr<internal::Loop> loop_;
};

}  // namespace shardbook::accelerate
