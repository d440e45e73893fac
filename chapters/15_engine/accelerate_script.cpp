#include "chapters/15_engine/accelerate_script.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/worlds.h"
#include "comm/processes.h"
#include "core/autograd.h"
#include "core/context.h"

namespace shardbook::accelerate {

// --- Objects -----------------------------------------------------------------

namespace {

engine::TrainingData training_data_of(const ScriptOptions& script,
                                      const ModelConfig& config) {
  return engine::training_data(Dataset::open(script.run, config),
                               script.num_samples);
}

/// Steps of the script's scheduler for one update.
std::int64_t scheduler_steps(const ScriptOptions& script) {
  return script.accelerator.split_batches ? 1 : data_parallel_size(script);
}

/// The rates of a schedule that is written for one process.
LrSchedule schedule_of(const ScriptOptions& script) {
  const Options& run = script.run;
  return [lr = run.optimizer_options.lr,
          factor =
              make_schedule(run.lr_schedule, run.warmup,
                            script.max_train_steps * scheduler_steps(script))](
             std::int64_t step) { return lr * factor(step); };
}

}  // namespace

Objects make_objects(const ScriptOptions& script) {
  const Options& run = script.run;
  Objects all;
  all.loaded = build_model(run);
  if (!script.config_has_optimizer) {
    all.optimizer.type = run.optimizer == "sgd"     ? "SGD"
                         : run.optimizer == "adamw" ? "AdamW"
                                                    : "Adam";
  }
  all.optimizer.params = run.optimizer_options;

  DataLoader& loader = all.loader;
  loader.data = training_data_of(script, all.loaded.config);
  loader.batch_size = script.batch_size;
  loader.shuffle = script.shuffle;
  loader.seed = run.seed;
  loader.drop_last = script.drop_last;
  // The evaluation's samples are behind the others
  all.eval_loader = {
      {script.eval_samples,
       [batch = loader.data.batch, first = script.num_samples](auto samples) {
         for (std::int64_t& each : samples) each += first;
         return batch(samples);
       }},
      script.batch_size};

  if (!script.config_has_scheduler) {
    all.scheduler.native =
        std::make_shared<engine::LrScheduler>(schedule_of(script));
  }
  all.scheduler.warmup_num_steps = run.warmup;
  all.scheduler.total_num_steps = script.max_train_steps;
  return all;
}

Tensor loss_by_sample(const Tensor& loss, const Batch& batch) {
  return Tensor::full({batch.inputs.size(0)}, loss.item(), loss.options());
}

std::string checkpoint_of(const ScriptOptions& script, std::int64_t updates) {
  const std::int64_t every = script.checkpointing_steps;
  if (every == 0 || updates % every != 0) return "";
  return script.output_dir + "/step_" + std::to_string(updates);
}

// --- History -----------------------------------------------------------------

void History::add_update(const ScriptOptions& script, Accelerator& acc,
                         double loss, double norm, double rate,
                         bool was_skipped) {
  const auto g =
      static_cast<double>(script.accelerator.gradient_accumulation_steps);
  losses.push_back(loss / g);
  norms.push_back(norm);
  acc.print(fmt::format("update {:3}  loss {:.4f}  norm {:.4f}  rate {:.3g}{}",
                        first_update + static_cast<std::int64_t>(losses.size()),
                        losses.back(), norm, rate,
                        was_skipped ? "  skipped" : ""));
}

void History::add_evaluated(const Tensor& losses) {
  const auto values = losses.to_vector<double>();
  evaluated.insert(evaluated.end(), values.begin(), values.end());
}

void History::finish(Accelerator& acc, std::vector<NamedTensor> all_weights) {
  weights = on_host(std::move(all_weights));
  threads = RankContext::current().num_threads;
  const double sum = std::accumulate(evaluated.begin(), evaluated.end(), 0.0);
  acc.print(fmt::format("eval        loss {:.4f}  {} samples",
                        sum / static_cast<double>(evaluated.size()),
                        evaluated.size()));
}

// --- One process -------------------------------------------------------------

namespace {

/// The script without an Accelerator: one process reads the samples of all.
ReferenceRun train_one_process(const ScriptOptions& script,
                               const Options& options) {
  const LoadedModel loaded = build_model(options);
  const engine::TrainingData data = training_data_of(script, loaded.config);
  const auto optimizer = make_optimizer(
      options.optimizer, loaded.model->parameters(), options.optimizer_options);
  const std::int64_t g = script.accelerator.gradient_accumulation_steps;
  const std::int64_t per_epoch = updates_per_epoch(script);
  return train_yardstick(
      options, *optimizer, state_of(*loaded.model), [&](std::int64_t step) {
        const auto rounds = rounds_of(script, step / per_epoch);
        const auto first = static_cast<std::size_t>(step % per_epoch * g);
        const std::size_t end =
            std::min(first + static_cast<std::size_t>(g), rounds.size());
        StepResult result;
        for (std::size_t i = first; i < end; ++i) {
          const Batch batch = data.batch(rounds[i]);
          const Tensor loss =
              language_loss((*loaded.model)(batch.inputs), batch.targets);
          // A short window is divided by the full number all the same
          const double share = 1 / static_cast<double>(g);
          autograd::backward({loss}, {Tensor::full({}, share, loss.options())});
          result.loss += loss.item() * share;
        }
        result.grad_norm = update_parameters(options, *optimizer);
        return result;
      });
}

/// Prints the verdict, and returns the exit status.
int judge(const ScriptOptions& script, const History& history) {
  if (!script.run.check) return 0;
  if (script.accelerator.mixed_precision == "fp16" ||
      history.weights[0].tensor.dtype() == DType::kF16) {
    fmt::print(
        "numbers     not compared: fp16 leaves out updates that overflow\n");
    return 0;
  }
  Options options = script.run;
  options.steps = script.max_train_steps;
  options.clip = std::isinf(script.max_grad_norm) ? 0 : script.max_grad_norm;
  if (!options.rate) {
    options.rate = [rate = schedule_of(script), n = scheduler_steps(script)](
                       std::int64_t update) { return rate(update * n); };
  }
  Report report;
  report.losses = history.losses;
  if (history.first_update == 0) report.grad_norms = history.norms;
  report.rank_threads = history.threads;
  compare_with_reference(
      options, history.weights,
      [&](const Options& alone) {
        ReferenceRun run = train_one_process(script, alone);
        run.losses.erase(run.losses.begin(),
                         run.losses.begin() + history.first_update);
        if (history.first_update > 0) run.grad_norms.clear();
        return run;
      },
      report);
  const Parity& parity = report.parity;
  fmt::print(
      "numbers     largest difference from one process {:.3g}, relative {:.3g} "
      "(allowed {:.3g}): {}\n",
      parity.max_abs, parity.max_rel, parity.tolerance,
      parity.passed ? "equal" : "DIFFERENT");
  return parity.passed ? 0 : kExitClaimFailed;
}

}  // namespace

int run_script(const ScriptOptions& script,
               const std::function<History(ProcessGroup& world)>& body) {
  const LaunchOptions launch = launch_options(script.run);
  if (script.run.backend == "gloo") {
    if (const auto status = launch_processes(script.run.world_size, launch)) {
      return *status;
    }
  }
  const std::string tokens = tokens_text(script.run);
  std::optional<History> main_history;
  run_ranks(
      script.run.world_size,
      [&](ProcessGroup& world) {
        History history = body(world);
        if (world.rank() == 0) main_history = std::move(history);
      },
      launch);
  // In a process of another rank there is nothing to judge
  if (!main_history) return 0;
  if (!tokens.empty()) fmt::print("data        {}\n", tokens);
  return judge(script, *main_history);
}

}  // namespace shardbook::accelerate
