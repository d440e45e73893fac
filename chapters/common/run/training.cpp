#include "chapters/common/run/training.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/run/checkpoints.h"
#include "chapters/common/run/exit_status.h"
#include "comm/launch.h"
#include "comm/signals.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"
#include "core/ops.h"
#include "core/stream.h"
#include "core/terminal.h"
#include "core/text_file.h"
#include "core/xtensor.h"
#include "sim/steady_state.h"
#include "sim/virtual_clock.h"

namespace shardbook {
namespace {

double now_s() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Times a step. A GPU finishes its work after the host has gone on, so events
/// in the GPU's own queue mark where a step begins and ends.
class StepTimer {
 public:
  void begin() {
    if (on_gpu_) begin_.record();
    begin_s_ = now_s();
  }
  double seconds() const {
    if (!on_gpu_) return now_s() - begin_s_;
    Event end;
    end.record();
    end.synchronize();
    return end.elapsed_s(begin_);
  }

 private:
  const bool on_gpu_ = RankContext::current().device.is_cuda();
  Event begin_;
  double begin_s_ = 0;
};

/// A line that overwrites itself, on terminals that can do so. Shapes have no
/// loss.
void show_progress(const Options& options, std::int64_t done,
                   std::int64_t total, double loss) {
  if (options.is_prediction || !obeys_escapes(STDERR_FILENO)) return;
  fmt::print(stderr, "\r  step {}/{}{}{}", done, total,
             options.backend == "sim" ? "" : fmt::format("  loss {:.4f}", loss),
             done == total ? "\r\033[K" : "");
  std::fflush(stderr);
}

// Finds the first step whose loss or gradient is not finite.
class FiniteWatch {
 public:
  explicit FiniteWatch(DType dtype) : is_f16_(dtype == DType::kF16) {}

  void see(std::int64_t step, const StepResult& result, bool is_main,
           TrainingLog::NotFinite& first) {
    const bool was_finite =
        std::exchange(RankContext::current().losses_are_finite, true);
    if (first.step >= 0) return;
    if (!was_finite || (is_main && !std::isfinite(result.loss))) {
      // A gradient that is not finite spoils the weights, which spoil the loss.
      first = gradient_;
      if (first.step < 0) first = {step, !was_finite, false};
      return;
    }
    // With more exponent bits than f16 has, a skipped step is no overflow that a
    // smaller loss scale would mend.
    if (result.was_skipped && !is_f16_) {
      first = {step, false, true};
      return;
    }
    // Some steps do not know their norm, and f16 skips those that overflow: a
    // norm that is not finite counts if the next loss is not finite either.
    const bool was_seen = gradient_.step >= 0;
    const bool is_news = !was_seen && !has_survived_;
    if (was_seen) has_survived_ = true;
    gradient_ = {};
    if (is_news && !std::isfinite(result.grad_norm)) {
      gradient_ = {step, false, true};
    }
  }

 private:
  bool is_f16_;
  TrainingLog::NotFinite gradient_;  // seen in the step before
  bool has_survived_ = false;
};

/// --log, empty at first; a resumed run keeps the lines of the steps before its
/// first one, without those of the steps that it repeats.
std::ofstream open_log(const Options& options) {
  std::string kept;
  std::ifstream before(options.log);
  for (std::string line;
       options.first_step > 0 && std::getline(before, line);) {
    const auto step = nlohmann::json::parse(line, nullptr, false);
    if (!step.is_object() || !step.contains("step") ||
        !step["step"].is_number_integer() ||
        step["step"] >= options.first_step) {
      break;
    }
    kept += line + "\n";
  }
  // A killed run must not lose these lines
  const std::string name = kept.empty() ? options.log : options.log + ".new";
  std::ofstream log(name);
  log << kept << std::flush;
  if (!log || (name != options.log &&
               std::rename(name.c_str(), options.log.c_str()) != 0)) {
    fail_to_write("--log " + options.log + ": this file");
  }
  return log;
}

/// Ends the run after a signal.
[[noreturn]] void stop(const Options& options, std::int64_t steps_done,
                       const Checkpoints* checkpoints) {
  std::string kept;
  if (!options.save.empty())
    kept = "; " + options.save + " is as it was before";
  if (checkpoints != nullptr) {
    kept += checkpoints->newest().empty()
                ? "; there is no checkpoint yet"
                : "; --resume goes on from " + checkpoints->newest();
  }
  throw Interrupted("interrupted after " + std::to_string(steps_done) + " of " +
                    std::to_string(options.first_step + options.steps) +
                    " steps" + kept);
}

}  // namespace

void note_kept_activations() {
  RankContext::current().device.note_held(MemoryKind::kActivation);
}

TrainingLog train(const Options& options, Optimizer& optimizer, bool is_main,
                  const std::function<StepResult(std::int64_t)>& step,
                  Checkpoints* checkpoints) {
  const std::int64_t end = options.first_step + options.steps;
  const LrSchedule schedule =
      make_schedule(options.lr_schedule, options.warmup, end);
  std::ofstream log;
  if (is_main && !options.log.empty() && !options.is_prediction) {
    log = open_log(options);
  }
  TrainingLog result;
  std::vector<double> seconds;
  std::vector<double> open_lrs;  // of steps that have not ended
  StepTimer timer;
  RandomState& random = RankContext::current().random;
  random.seed = options.seed;
  sim::VirtualClock* clock = sim::VirtualClock::current();
  if (clock != nullptr) clock->begin_steps();
  // On shapes there is nothing to end in good order
  if (options.backend != "sim") {
    begin_checking_signals();
    begin_run();
  }
  FiniteWatch finite(options.dtype);
  std::int64_t skipped =
      checkpoints != nullptr ? checkpoints->skipped_steps() : 0;
  for (std::int64_t k = options.first_step; k < end; ++k) {
    if (checkpoints == nullptr) {
      if (interrupted()) stop(options, k, nullptr);
    } else if (checkpoints->agree_to_stop(interrupted())) {
      checkpoints->after_step(k, skipped, /*is_last=*/true,
                              result.not_finite.step < 0);
      stop(options, k, checkpoints);
    }
    // A skipped step does not move the schedule either
    const std::int64_t at = k - skipped;
    const double lr = options.rate
                          ? options.rate(at)
                          : options.optimizer_options.lr * schedule(at);
    optimizer.set_lr(lr);
    random.step = static_cast<std::uint64_t>(k);
    random.next_op = 0;
    if (open_lrs.empty()) timer.begin();
    const StepResult done = step(k);
    open_lrs.push_back(lr);
    if (done.is_open) continue;
    if (done.was_skipped) ++skipped;
    const auto count = static_cast<std::int64_t>(open_lrs.size());
    const double each_s = timer.seconds() / static_cast<double>(count);
    if (clock != nullptr) clock->end_step();
    for (std::int64_t i = 0; i < count; ++i) {
      const bool is_this = i == count - 1;
      const double loss =
          is_this ? done.loss : done.open_losses[static_cast<std::size_t>(i)];
      result.losses.push_back(loss);
      result.grad_norms.push_back(
          is_this ? done.grad_norm : std::numeric_limits<double>::quiet_NaN());
      seconds.push_back(each_s);
      if (!log.is_open()) continue;
      nlohmann::ordered_json line = {
          {"step", k - count + 1 + i},
          {"loss", loss},
          {"grad_norm", done.grad_norm},
          {"lr", open_lrs[static_cast<std::size_t>(i)]},
          {"tokens_per_s",
           static_cast<double>(options.batch * options.seq) / each_s},
          {"virtual_s", nullptr},
          {"wall_s", each_s}};
      if (options.backend == "sim") {  // shapes have no numbers to measure
        for (const char* key :
             {"loss", "grad_norm", "tokens_per_s", "wall_s"}) {
          line[key] = nullptr;
        }
      }
      if (clock != nullptr) {
        line["virtual_s"] = clock->last_step_s() / static_cast<double>(count);
      }
      log << line.dump() << std::endl;
      if (!log) fail_to_write("--log " + options.log + ": this file");
    }
    finite.see(k, done, is_main, result.not_finite);
    open_lrs.clear();
    if (is_main) show_progress(options, k + 1, end, done.loss);
    if (checkpoints != nullptr) {
      checkpoints->after_step(k + 1, skipped, /*is_last=*/k + 1 == end,
                              result.not_finite.step < 0);
    }
  }
  if (seconds.size() > 1) seconds.erase(seconds.begin());
  if (!seconds.empty()) {
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2,
                     seconds.end());
    result.step_s = seconds[seconds.size() / 2];
  }
  return result;
}

ModelConfig model_config(const ModelOptions& options) {
  ModelConfig config = options.planned != nullptr
                           ? *options.planned
                           : ModelConfig::read(options.model);
  config.dropout = options.dropout;
  SB_CHECK(config.type == "gpt2" || options.dropout == 0, "--dropout ",
           options.dropout, ": ", options.model,
           " has no dropout; give 0, or a GPT");
  SB_CHECK(config.is_image() || options.seq <= config.n_positions, "--seq ",
           options.seq, ": ", options.model, " has ",
           how_many(config.n_positions, "position"));
  return config;
}

LoadedModel build_model(const Options& options) {
  LoadedModel loaded;
  loaded.config = model_config(options);
  loaded.model = make_model(loaded.config, {options.seed, options.dtype});
  if (!options.load.empty()) {
    load_model(options.load, *loaded.model, loaded.config);
  }
  return loaded;
}

LoadedModel model_with(const Options& options,
                       const std::vector<NamedTensor>& state) {
  Options fresh = options;
  fresh.load.clear();
  LoadedModel loaded = build_model(fresh);
  loaded.model->load_values(state);
  return loaded;
}

double accumulate_pieces(const Options& options, Module& model,
                         const std::vector<MicroBatch>& pieces,
                         double loss_scale, const PieceGradients& add) {
  RandomState& random = RankContext::current().random;
  double mean_loss = 0;
  for (const MicroBatch& piece : pieces) {
    random.batch = piece.slice;
    random.next_op = 0;
    // The share of this piece in the mean over the whole batch.
    const double share =
        static_cast<double>(piece.rows) / static_cast<double>(options.batch);
    mean_loss += add(piece, share * loss_scale) * share;
  }
  random.batch = BatchSlice{};
  commit_batch_norms(model);
  return mean_loss;
}

double accumulate_gradients(const Options& options, Module& model,
                            const Dataset& data, std::int64_t step,
                            const std::vector<MicroBatch>& pieces,
                            double loss_scale, const LossFunction& loss_of) {
  return accumulate_pieces(
      options, model, pieces, loss_scale,
      [&](const MicroBatch& piece, double factor) {
        const Batch batch =
            data.batch(step, options.batch, piece.slice, piece.rows);
        const Tensor loss = with_balancing_loss(
            model, loss_of(model(batch.inputs), batch.targets),
            static_cast<std::int64_t>(pieces.size()));
        note_kept_activations();
        const double value = loss.item();
        autograd::backward({loss}, {Tensor::full({}, factor, loss.options())});
        return value;
      });
}

double accumulate_gradients(const Options& options, Module& model,
                            const Dataset& data, std::int64_t step,
                            std::int64_t num_micro_batches, double loss_scale) {
  return accumulate_gradients(
      options, model, data, step,
      strided_micro_batches(options.batch, num_micro_batches), loss_scale);
}

void check_even_batch(const ModelOptions& options, int num_ranks,
                      std::int64_t num_micro_batches,
                      const std::string& option) {
  SB_CHECK(options.batch % num_ranks == 0, "--batch ", options.batch,
           ": does not divide by --world-size ", num_ranks,
           "; a mean over ranks is the mean over samples only where all ranks "
           "have equally many");
  SB_CHECK(options.batch % (num_ranks * num_micro_batches) == 0, option, " ",
           num_micro_batches, ": a rank's ",
           how_many(options.batch / num_ranks, "sample"),
           " cannot be divided into so many equal micro-batches");
}

Tensor data_parallel_gradients(
    const Options& options, ProcessGroup& dp, const Dataset& data,
    std::int64_t step, std::int64_t num_micro_batches,
    const std::function<void(bool is_last)>& begin_piece,
    const std::function<Tensor(const Tensor& inputs)>& forward,
    const LossFunction& loss_of,
    const std::function<void(const Tensor& loss)>& backward) {
  const std::int64_t d = dp.size(), g = num_micro_batches;
  RandomState& random = RankContext::current().random;
  Tensor mean_loss;
  Work loss_work;
  double local_loss = 0;
  sim::repeat(dp, g, [&](std::int64_t i) {
    begin_piece(i + 1 == g);
    // Take every d-th sample, and draw dropout at their global positions
    const Batch batch =
        data.batch(step, options.batch, BatchSlice{dp.rank() + d * i, d * g},
                   options.batch / (d * g));
    random.batch = batch.slice;
    random.next_op = 0;

    const Tensor loss = loss_of(forward(batch.inputs), batch.targets);
    note_kept_activations();
    local_loss += loss.item() / static_cast<double>(g);
    if (i + 1 == g) {
      // The loss travels while backward runs
      const MemoryScope kind(MemoryKind::kCommunication);
      mean_loss = Tensor::full({}, local_loss / static_cast<double>(d),
                               {DType::kF64, Device()});
      loss_work = dp.all_reduce(mean_loss, ReduceOp::kSum, "loss");
    }
    if (backward) return backward(loss);
    const double share = 1 / static_cast<double>(g);
    autograd::backward({loss}, {Tensor::full({}, share, loss.options())});
  });
  random.batch = BatchSlice{};
  loss_work.wait();
  return mean_loss;
}

double update_parameters(const Options& options, Optimizer& optimizer) {
  const double norm = grad_norm(optimizer.parameters());
  clip_and_update(options, optimizer, norm);
  return norm;
}

double update_unscaled(const Options& options, Optimizer& optimizer,
                       DynamicLossScaler& scaler) {
  const Tensors& parameters = optimizer.parameters();
  // Update, or skip a step that overflowed
  const double norm = grad_norm(parameters) / scaler.scale();
  const bool overflow = !std::isfinite(norm);
  if (!overflow) {
    double factor = 1 / scaler.scale();
    if (options.clip > 0) factor *= clip_factor(norm, options.clip);
    optimizer.step(factor);
  }
  scaler.update(overflow);
  for (const Tensor& parameter : parameters) parameter.clear_grad();
  return norm;
}

void clip_and_update(const Options& options, Optimizer& optimizer,
                     double norm) {
  const Tensors& parameters = optimizer.parameters();
  if (options.clip > 0) clip_gradients(parameters, norm, options.clip);
  optimizer.step();
  for (const Tensor& parameter : parameters) parameter.clear_grad();
}

void save_results(const Options& options, const LoadedModel& loaded,
                  const Dataset& data) {
  if (!options.save.empty()) {
    const std::string name =
        options.save_non_finite ? "" : first_not_finite(*loaded.model);
    if (!name.empty()) {
      throw RunError("--save " + options.save + ": '" + name +
                     "' has values that are infinite or not a number; the "
                     "file is as it was before (--save-non-finite writes it "
                     "all the same)");
    }
    save_model(options.save, *loaded.model, loaded.config,
               options.save_names == "transformers"
                   ? WeightNames::kTransformers
                   : WeightNames::kTorchvision);
  }
  if (options.logits.empty()) return;
  NoGrad no_grad;
  loaded.model->train(false);
  const Batch batch = data.batch(0, options.batch);
  const Tensor logits = (*loaded.model)(batch.inputs);
  loaded.model->train(true);
  if (options.logits.ends_with(".npy")) return save_npy(options.logits, logits);
  const bool images = loaded.config.is_image();
  std::vector<NamedTensor> results = {
      {images ? "pixel_values" : "input_ids", batch.inputs},
      {"logits", logits}};
  // Labels are random: no reader of the images could know them
  if (images) results.push_back({"labels", batch.targets});
  save_tensors(options.logits, results);
}

}  // namespace shardbook
