#pragma once

// A model under DataParallel.

#include <cstdint>
#include <memory>
#include <vector>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/common/models/data.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::data_parallel {

class DataParallelStrategy : public Strategy {
 public:
  /// Builds the model, its data and its optimizer on devices[0].
  DataParallelStrategy(const Options& options,
                       const std::vector<Device>& devices);

  /// Forward, loss, backward and update on global batch `step`; parameters, loss
  /// and optimizer live on the main device.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run data_parallel -- --world-size 4 --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;
  CopyLedger* copies() override { return model_.ledger().get(); }

 private:
  Options options_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<Optimizer> optimizer_;
  DataParallel model_;
};

}  // namespace shardbook::data_parallel
