#pragma once

// Forward and backward of micro-batches as graphs of a GPU (core/device_graph.h),
// for one device that trains alone.
//
// The first step runs each operation, and so starts libraries and makes plans.
// In the second step each kind of piece is recorded; from there on it is
// launched:
//
//   kind                    first piece      later pieces, for each number of rows
//   gradients               are created      are added to
//   copied in before        tokens, targets, the gradient that backward starts from
//   valid after a launch    the loss, the gradients
//
// Pieces launch one after another, so all graphs share one memory. They give
// the same bits as the operations one by one. They exclude the optimizer.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "chapters/common/run/training.h"
#include "core/device_graph.h"

namespace shardbook {

/// Throws Error where a training step cannot be repeated by a graph.
void check_cuda_graphs(const Options& options);

class PieceGraphs {
 public:
  /// `model` and `data` must outlive it. The loss is language_loss.
  PieceGraphs(const Options& options, Module& model, const Dataset& data);

  /// Like accumulate_gradients, for parameters without gradients.
  double accumulate(std::int64_t step, std::int64_t num_micro_batches,
                    double loss_scale);

 private:
  struct Piece {
    std::optional<DeviceGraph> graph;
    Tensor loss;
  };

  void load(std::int64_t step, const MicroBatch& piece, double factor);
  /// Forward and backward; returns the loss.
  Tensor compute(std::int64_t rows) const;
  Tensor launch(std::int64_t rows, bool is_first);
  void record(Piece& piece, std::int64_t rows);

  const Options options_;
  Module& model_;
  const Dataset& data_;
  bool has_warmed_up_ = false;
  Tensor inputs_, targets_;  // of the first piece; smaller ones use part of it
  Tensor start_;             // what backward starts from
  /// By rows, and whether the gradients are created.
  std::map<std::pair<std::int64_t, bool>, Piece> pieces_;
  const DeviceGraph* first_ = nullptr;
  std::vector<std::pair<Tensor, Tensor>> gradients_;  // of each parameter
};

}  // namespace shardbook
