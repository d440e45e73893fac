#pragma once

// Training on one device, on two in turn, or on two at the same time.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/common/models/data.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::model_parallel {

/// "single": one device. "model_parallel": the naive schedule on two.
/// "pipeline": splits on two.
inline const std::vector<std::string> kVariants = {"single", "model_parallel",
                                                   "pipeline"};

/// The chapter's own options.
struct Settings {
  std::string variant = "pipeline";
  /// Rows of a split. For `single`, 0 is the whole batch at once.
  std::int64_t split_size = 6;
  /// Where the model is cut: "half" (half_of), or as cuts_of reads it.
  std::string partition = "half";
  /// "mse" (against one-hot labels) or "cross_entropy".
  std::string loss = "mse";

  int num_devices() const { return variant == "single" ? 1 : 2; }
};

/// Options that do not concern the training itself.
struct Extras {
  std::string sweep;  ///< split sizes; empty: none
  std::int64_t repeats = 5;
};
/// A ResNet-18 on the documents' two T4.
Options default_options();
void add_options(CommandLine& line, Settings& settings, Extras& extras);
/// Fills in the values that depend on other options. Throws Error for options
/// that contradict each other.
void check_settings(const Options& options, Settings& settings);

/// The settings of the reference run: one device, over the same splits.
Settings on_one_device(const Settings& settings);

/// Rows that a device computes together: a split, or the batch.
std::int64_t rows_of_split(const Options& options, const Settings& settings);

/// The number of layers on the first device. "time" balances one split on
/// --cluster. Throws Error for a partition that does not fit the model.
int cut_of(const Options& options, const Settings& settings,
           const LayerList& layers);

/// The model's input for `rows` rows, without data.
Tensor input_on_shapes(const Options& options, std::int64_t rows);

/// Labels i64 [n] as one-hot rows [n, classes], on the labels' device.
Tensor one_hot(const Tensor& labels, std::int64_t classes, DType dtype);

class ModelParallelStrategy : public Strategy {
 public:
  /// `devices`: as many as the variant has; the first is the current one. Each
  /// computes on `num_threads` cores. Loads --load. Throws Error for a loss or
  /// a model that does not fit the variant.
  ModelParallelStrategy(const Options& options, const Settings& settings,
                        const std::vector<Device>& devices, int num_threads);
  ~ModelParallelStrategy() override;

  /// The next batch, on the first device.
  Batch batch(std::int64_t step) const {
    return data_.batch(step, options_.batch);
  }
  Tensor forward(const Tensor& inputs);
  /// Forward, loss, backward, and an update of each parameter on its device.
  /// The gradients' norm is computed only for --clip and --log.
  StepResult step(const Batch& batch);
  StepResult step(std::int64_t step) override {
    return this->step(batch(step));
  }
  /// The optimizer of the first device; the other follows its learning rate.
  Optimizer& optimizer() override { return *optimizers_[0]; }
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run model_parallel -- --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;
  /// Null on one device.
  CopyLedger* copies() override;

  /// The layers on one device.
  Stage& part(int device);
  std::vector<NamedTensor> named_parameters();
  const ModelConfig& config() const { return config_; }
  const LayerList& layers() const { return *layers_; }
  int cut() const { return cut_; }

 private:
  Tensor loss_of(const Tensor& output, const Tensor& targets);
  double update();

  Options options_;
  Settings settings_;
  ModelConfig config_;
  Dataset data_;
  std::unique_ptr<LayerList> layers_;
  int cut_ = 0;
  std::unique_ptr<Stage> single_;
  std::unique_ptr<ModelParallel> parallel_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  // by device
};

/// The reference run: all layers on the current device, over the splits of
/// `settings`.
ReferenceRun train_reference(const Options& options, const Settings& settings);

}  // namespace shardbook::model_parallel
