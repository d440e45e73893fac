#pragma once

// A language model in a pipeline: what main.cpp and the benchmarks repeat.

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/06_1f1b/post_validation.h"
#include "chapters/06_1f1b/weight_stash.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/feed.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::pipeline {

struct TrainerOptions {
  std::string schedule = "1f1b";  ///< a name, or FILE.json
  std::int64_t micro_batches = 8;
  int chunks = 2;  ///< per rank: interleaved schedules
  int group = 0;   ///< interleaved-grouped; 0: the number of ranks
  /// zb-auto: sets of activations that a rank may keep; 0: twice the ranks.
  double memory_limit = 0;
  std::string replicas;               ///< pipedream: "2,1,1", ranks per stage
  std::string partition = "uniform";  ///< as shardbook::cuts_of reads it
  /// Which micro-batches keep their stage's input alone.
  std::string recompute = "never";
  bool early_recompute = true;
  bool stash = true;
  bool vertical_sync = false;
  bool post_validation = false;
  bool print_schedule = false;
  std::string write_schedule;  ///< FILE.json
  /// Flags that were given: those that the schedule does not read are refused.
  std::vector<std::string> given;

  /// Nothing is run.
  bool only_shows() const { return print_schedule || !write_schedule.empty(); }
};

void add_options(CommandLine& line, TrainerOptions& how);

/// What the options say, before there are ranks.
struct Plan {
  ModelConfig config;
  Schedule schedule;
  std::shared_ptr<const LayerList> layers;
  std::vector<MicroBatch> pieces;  ///< of a step
  std::vector<int> cuts;
  bool is_asynchronous() const { return !schedule.flushes; }
  /// The same for a run on shapes of `options`, and the options for it: without
  /// a flush, all steps that the lists have and none that repeat.
  Plan on_shapes(Options* options) const;
};
/// Throws Error for what does not go together. Where nothing is to be run
/// (TrainerOptions::only_shows) there are a schedule and no model, and the
/// batch has as many rows as it needs.
Plan make_plan(const Options& options, const TrainerOptions& how);
/// The run that the numbers are compared with: one device that accumulates in
/// the order of the schedule, or (asynchronous) follows its versions.
ReferenceRun reference_run(const Options& options, const TrainerOptions& how,
                           const Plan& plan);

class Trainer : public Strategy {
 public:
  /// Collective.
  Trainer(const Options& options, const TrainerOptions& how, Plan plan,
          ProcessGroup& pp);

  /// One optimizer step. Schedules that flush: the mean loss of the batch, and
  /// the norm, on every rank; with post-validation the loss on rank 0, and no
  /// norm (NaN). Others: this rank's list up to its next update; the loss on
  /// rank 0, and the norm of this stage's own gradient. R replicas of a stage
  /// update every R steps: the steps before that stay open.
  StepResult step(std::int64_t step) override;
  /// Validates, and waits for messages that are on their way.
  void finish() override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override { return {{predicted_bytes(), bill()}}; }
  /// Steps that were taken back cost time that no formula foresees.
  bool has_predictable_time() const override { return num_amended() == 0; }
  std::vector<NamedTensor> full_state() override {
    return model_.full_parameters();
  }
  /// Of schedules that do not flush: how old the weights were.
  std::string remarks() override;

  const Dataset& data() const { return data_; }
  /// Empty for schedules that flush.
  const std::vector<VersionUse>& version_uses() const;
  /// Steps that post-validation amended.
  int num_amended() const { return post_ ? post_->num_amended() : 0; }

  /// Bytes that a rank sends in options.steps steps.
  double predicted_bytes();
  /// Peak memory of a rank, by kind.
  MemoryBill bill();

 private:
  StepResult asynchronous_step(std::int64_t step);
  StepResult post_validated_step(std::int64_t step);
  void note_loss(int micro_batch, double loss);
  void send_loss(std::int64_t step, double loss);
  double step_loss(std::int64_t step);
  int loss_rank(std::int64_t step) const;
  int loss_tag(std::int64_t step) const;

  Options options_;
  TrainerOptions how_;
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
  /// Losses on their way to rank 0.
  struct Sent {
    Tensor value;
    Work work;
  };
  std::deque<Sent> sent_;
  std::int64_t first_step_ = 0;  ///< micro-batch 0 belongs to it
  /// Of the micro-batches of a step that have ended here, by step.
  struct Losses {
    int count = 0;
    double sum = 0;
  };
  std::map<std::int64_t, Losses> losses_;
};

}  // namespace shardbook::pipeline
