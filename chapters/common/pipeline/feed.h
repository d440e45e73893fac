#pragma once

// Language models in a pipeline: the rows of each micro-batch.

#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/run/training.h"

namespace shardbook::pipeline {

/// Cuts global batches into micro-batches of consecutive rows, the last one
/// short (rule CEIL). The first and the last stage read the same data set.
class LanguageFeed : public Feed {
 public:
  /// `loss_of` is the loss of the model's LayerFactory.
  LanguageFeed(const Options& options, const Dataset& data,
               std::vector<MicroBatch> pieces,
               LossFunction loss_of = language_loss);

  /// Micro-batch b belongs to step first_step + b / pieces.
  void set_first_step(std::int64_t step) { first_step_ = step; }
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  const std::vector<MicroBatch>& pieces() const { return pieces_; }

  Piece piece(int micro_batch) const override;
  Tensors inputs(int micro_batch) override;
  Tensor loss(int micro_batch, const Tensors& outputs) override;
  Tensors example(std::int64_t rows) const override;
  DType dtype() const override { return dtype_; }
  double loss_scale() const override { return loss_scale_; }

 protected:
  Batch batch(int micro_batch) const;

 private:
  const Dataset& data_;
  std::int64_t rows_per_step_;
  DType dtype_;
  std::vector<MicroBatch> pieces_;
  LossFunction loss_of_;
  std::int64_t first_step_ = 0;
  double loss_scale_ = 1;
};

}  // namespace shardbook::pipeline
