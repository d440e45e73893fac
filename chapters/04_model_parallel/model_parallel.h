#pragma once

// Model parallelism: the first layers on one device, the others on another.
//
//   const auto layers = resnet_layers(ModelConfig::read("resnet50"));
//   ModelParallel naive(*layers, half_of(config), {gpu0, gpu1}, init);
//   Tensor y = naive(images);             // y is on gpu1
//   PipelineParallel pipelined(*layers, half_of(config), {gpu0, gpu1}, init,
//                              /*split_size=*/20);
//
// One process and one autograd graph: the boundary between the devices is a
// differentiable copy (boundary.h). Each device has a queue (device_queue.h):
// the forward hands out work and goes on, and that is all that overlap needs.
//
//   split_size = batch              split_size = batch / 3
//   device 0  | seq1 |      |       | 0 | 1 | 2 |   |
//   device 1  |      | seq2 |       |   | 0 | 1 | 2 |
//
// An object is used by one thread at a time, and that is the thread which ran
// when it was made. Queues run on `num_threads` cores each.
//
// PyTorch tutorials, "Single-Machine Model Parallel Best Practices" (Shen Li):
// ToyModel, ModelParallelResNet50, PipelineParallelResNet50.

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "chapters/04_model_parallel/boundary.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/stages.h"
#include "core/device_queue.h"

namespace shardbook::model_parallel {

// --- Pure functions ----------------------------------------------------------

/// Rows [begin, end) of pieces of exactly `split_size`, the last one short:
/// rule FIXED (torch.split). 5 by 2 gives [0,2) [2,4) [4,5). No rows make one
/// empty piece.
using RowRange = std::pair<std::int64_t, std::int64_t>;
std::vector<RowRange> fixed_splits(std::int64_t rows, std::int64_t split_size);

/// How many layers come before the cut: of a ResNet the stem and the first half
/// of its stages (conv1 .. layer2 | layer3 .. fc), of other models half.
int half_of(const ModelConfig& config);

/// Forward time of n_s splits over that of the naive schedule, when both halves
/// take equally long and copies nothing: (n_s + 1) / (2 n_s).
double ideal_forward_share(std::int64_t num_splits);

// --- Two devices
// ---------------------------------------------------------------

/// The naive schedule: one device at a time. Output and labels are on
/// devices[1].
class ModelParallel {
 public:
  /// Layers 0 .. cut-1 on devices[0], the others on devices[1]. Throws Error
  /// for a cut that leaves a device without layers, for other than two devices,
  /// and when a parameter stands on both sides of the cut.
  ModelParallel(const LayerList& layers, int cut,
                const std::vector<Device>& devices, const InitOptions& init,
                int num_threads = 1);
  virtual ~ModelParallel() = default;

  /// x on devices[0]. Returns when the output is there. Throws what a device's
  /// work threw.
  virtual Tensor operator()(const Tensor& x);

  /// The layers of each device; parameters of one are on that device.
  Stage& half(int device) { return *halves_[index(device)]; }
  DeviceQueue& queue(int device) { return *queues_[index(device)]; }
  const Device& device(int device) const {
    return queues_[index(device)]->device();
  }
  /// Distinct parameters of both halves, in the order of the model.
  std::vector<NamedTensor> named_parameters();
  const SharedLedger& ledger() const { return ledger_; }

 protected:
  /// A value that a queue will have computed. Whoever uses it next takes it
  /// out, so that memory is released where it is used.
  using Later = std::shared_ptr<Tensor>;
  static Later now(Tensor x) { return std::make_shared<Tensor>(std::move(x)); }
  /// A half on its device.
  Later run(int device, const Later& x);
  /// From device 0 to device 1: after what both have been given so far, and
  /// before what either is given from now on.
  Later move(const Later& x);
  /// Along dim 0, when all are there; the host waits.
  Tensor join(const std::vector<Later>& parts);

 private:
  static std::size_t index(int device) {
    return static_cast<std::size_t>(device);
  }
  std::array<std::unique_ptr<Stage>, 2> halves_;
  SharedLedger ledger_;
  // Last, so that they end first.
  std::array<std::unique_ptr<DeviceQueue>, 2> queues_;
};

/// The batch in splits: device 1 works on one while device 0 works on the next.
/// Batch norms see one split at a time.
class PipelineParallel : public ModelParallel {
 public:
  /// Throws Error when split_size is below 1.
  PipelineParallel(const LayerList& layers, int cut,
                   const std::vector<Device>& devices, const InitOptions& init,
                   std::int64_t split_size, int num_threads = 1);
  Tensor operator()(const Tensor& x) override;

  std::int64_t split_size() const { return split_size_; }

 private:
  std::int64_t split_size_;
};

/// What both are compared with: all layers on one device, in splits of
/// `split_size` rows (0: the whole batch at once).
Tensor forward_in_splits(Module& model, const Tensor& x,
                         std::int64_t split_size);

}  // namespace shardbook::model_parallel
