#pragma once

// Training a language model in a pipeline, for program.cpp and the benchmarks.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/06_1f1b/post_validation.h"
#include "chapters/06_1f1b/weight_stash.h"
#include "chapters/common/pipeline/pipeline_bill.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::pipeline {

struct StrategyOptions {
  std::string schedule = "1f1b";  ///< a name, or FILE.json
  std::int64_t micro_batches = 8;
  int chunks = 2;  ///< per rank: interleaved schedules
  /// zb-auto: sets of activations that a rank may keep; 0: twice the ranks.
  double memory_limit = 0;
  std::string replicas = {};          ///< pipedream: "2,1,1", ranks per stage
  std::string partition = "uniform";  ///< as shardbook::cuts_of reads it
  /// Which micro-batches keep only their stage's input.
  std::string recompute = "never";
  bool early_recompute = true;
  bool stash = true;
  bool vertical_sync = false;
  bool post_validation = false;
  /// On shapes, leave out micro-batches that repeat (EngineOptions).
  bool leaves_out_repetitions = true;
  bool print_schedule = false;
  std::string write_schedule = {};  ///< FILE.json
  /// The given flags; make_plan rejects flags that the schedule does not read.
  std::vector<std::string> given = {};

  /// True if the program prints or writes the schedule and runs nothing.
  bool only_shows() const { return print_schedule || !write_schedule.empty(); }
};

void add_options(CommandLine& line, StrategyOptions& setup);

/// The plan that follows from the options, made before ranks start.
struct Plan {
  ModelConfig config;
  Schedule schedule;
  std::shared_ptr<const LayerList> layers;
  std::vector<MicroBatch> pieces;  ///< of a step
  std::vector<int> cuts;
  bool is_asynchronous() const { return !schedule.flushes; }
  /// What an asynchronous plan does that one device would not, as JSON:
  /// "weights one update old".
  std::string other_training() const;
  /// The plan for the prediction on shapes, and its options. Without a flush,
  /// the prediction has only the steps in the lists, without repeats.
  Plan on_shapes(Options* options) const;
};
/// Throws Error for options that contradict each other. If nothing is to be run
/// (StrategyOptions::only_shows) the plan has a schedule and no model, and the
/// batch has as many rows as the schedule needs.
Plan make_plan(const Options& options, const StrategyOptions& setup);
/// Serves --print-schedule (a figure with F = 1, B = 2, I = W = 1; idle time,
/// sets of activations and versions of the weights) and --write-schedule.
/// Throws Error if the file cannot be written, or could not be read again.
void show_schedule(const Plan& plan, const StrategyOptions& setup);
/// The age of the weights in forward and backward, by rank, for each of the
/// first updates; "" for schedules that flush. Collective; the text is on rank
/// 0.
std::string staleness_table(const std::vector<VersionUse>& uses,
                            ProcessGroup& pp);

/// The reference run: one device that accumulates gradients in the order of the
/// schedule, or (asynchronous) follows its versions.
ReferenceRun reference_run(const Options& options, const StrategyOptions& setup,
                           const Plan& plan);

class PipelineStrategy : public Strategy {
 public:
  /// Collective.
  PipelineStrategy(const Options& options, const StrategyOptions& setup,
                   Plan plan, ProcessGroup& pp);

  /// One optimizer step. Schedules that flush return the mean loss of the batch
  /// and the norm on every rank; with post-validation, the loss on rank 0 and
  /// no norm (NaN). Other schedules run this rank's list up to its next update,
  /// and return the loss on rank 0 and the norm of this stage's own gradient. R
  /// replicas of a stage update every R steps; the steps between are open.
  StepResult step(std::int64_t step) override;
  /// Validates the last step, and waits for messages in flight.
  void finish() override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override {
    return {{predicted_bytes(), bill(), predicted_step_s()}};
  }
  std::string closed_form_command() const override {
    return "./shardbook run 1f1b -- --world-size 4 --cluster textbook";
  }
  /// No prediction covers the time of steps that were redone.
  bool has_predictable_time() const override { return num_amended() == 0; }
  std::vector<NamedTensor> full_state() override {
    return model_.full_parameters();
  }
  /// Refuses schedules that do not flush: batches and versions of the weights are
  /// in flight between any two steps.
  TrainingState state() override;
  /// The table of the weights' ages, for schedules that do not flush.
  std::string remarks() override;

  /// Steps that post-validation amended.
  int num_amended() const { return post_ ? post_->num_amended() : 0; }

 private:
  /// Bytes that a rank sends in options.steps steps.
  double predicted_bytes();
  MemoryBill bill();
  double predicted_step_s();
  StepResult asynchronous_step(std::int64_t step);
  StepResult post_validated_step(std::int64_t step);
  void note_loss(int micro_batch, double loss);
  double step_loss(std::int64_t step);
  int loss_rank(std::int64_t step) const;
  int loss_tag(std::int64_t step) const;

  Options options_;
  StrategyOptions setup_;
  Plan plan_;
  ProcessGroup& pp_;
  Dataset data_;
  LanguageFeed feed_;
  PipelineModel model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<StashedUpdates> updates_;
  std::optional<PostValidation> post_;
  int num_redone_ = 0;
  EngineOptions engine_options_;
  std::optional<Engine> engine_;
  NumberMail losses_to_rank_0_;
  std::int64_t first_step_ = 0;  ///< the step of micro-batch 0
  /// By step: the micro-batches whose last stage is here, so far.
  struct Losses {
    int count = 0;
    double sum = 0;
  };
  std::map<std::int64_t, Losses> losses_;
};

}  // namespace shardbook::pipeline
