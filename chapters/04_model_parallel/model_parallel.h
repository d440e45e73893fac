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
// differentiable copy (boundary.cpp). Each device has a queue (device_queue.h):
// the forward enqueues work without waiting for it, so the devices overlap.
//
//   split_size = batch              split_size = batch / 3
//   device 0  | seq1 |      |       | 0 | 1 | 2 |   |
//   device 1  |      | seq2 |       |   | 0 | 1 | 2 |
//
// Only the thread that created an object may use it. Each queue computes on
// `num_threads` cores.
//
// PyTorch tutorials, "Single-Machine Model Parallel Best Practices" (Shen Li):
// ToyModel, ModelParallelResNet50, PipelineParallelResNet50.

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/stages.h"
#include "comm/device_copies.h"
#include "core/device_queue.h"

namespace shardbook::model_parallel {

// --- Pure functions ----------------------------------------------------------

/// Rows [begin, end) of each split: `split_size` rows, fewer in the last one
/// (rule FIXED, as torch.split). 5 rows in splits of 2 give [0,2) [2,4) [4,5).
/// 0 rows give one empty split.
using RowRange = std::pair<std::int64_t, std::int64_t>;
std::vector<RowRange> fixed_splits(std::int64_t rows, std::int64_t split_size);

/// The number of layers before the cut: the stem and the first half of the
/// stages of a ResNet (conv1 .. layer2 | layer3 .. fc), half of the layers of
/// another model.
int half_of(const ModelConfig& config);

/// Forward time of n_s splits over that of the naive schedule, when both halves
/// take equally long and copies take no time: (n_s + 1) / (2 n_s).
double ideal_forward_share(std::int64_t num_splits);

// --- The boundary (boundary.cpp) ----------------------------------------------

/// Returns a copy of `x` on another device. Differentiable: backward copies the
/// gradient back. The ledger records each copy as a message between devices.
///
/// Each device's part of a graph runs backward on its own thread. The thread of
/// `to` copies the gradient as soon as it is computed, and goes on; the thread
/// of x's device waits for this copy and for nothing else. The memory for the
/// gradient is allocated in forward, so that the thread of `to` never allocates
/// memory on x's device.
///
/// Communication: x.numel() elements forward, and the same backward.
Tensor cross(const Tensor& x, const Device& to, const SharedLedger& ledger);

/// Copies labels, which have no gradient; their memory counts as input.
Tensor send_labels(const Tensor& labels, const Device& to,
                   const SharedLedger& ledger);

// --- Two devices -------------------------------------------------------------

/// The naive schedule: one device at a time. Output and labels are on
/// devices[1].
class ModelParallel {
 public:
  /// Puts layers 0 .. cut-1 on devices[0] and the others on devices[1]. Throws
  /// Error if a device would have no layers, if there are not two devices, and
  /// if a parameter is used on both sides of the cut.
  ModelParallel(const LayerList& layers, int cut,
                const std::vector<Device>& devices, const InitOptions& init,
                int num_threads = 1);
  virtual ~ModelParallel() = default;

  /// `x` is on devices[0]. Returns when the output is computed. Rethrows an
  /// exception of a device's work.
  virtual Tensor operator()(const Tensor& x);

  /// The layers of one device. Their parameters are on that device.
  Stage& half(int device) { return *halves_[index(device)]; }
  DeviceQueue& queue(int device) { return *queues_[index(device)]; }
  const Device& device(int device) const {
    return queues_[index(device)]->device();
  }
  /// Distinct parameters of both halves, in the order of the model.
  std::vector<NamedTensor> named_parameters();
  const SharedLedger& ledger() const { return ledger_; }

 protected:
  /// A value that a queue computes later. The work that uses the value moves it
  /// out, so that its memory is released right after this use.
  using Later = std::shared_ptr<Tensor>;
  static Later now(Tensor x) { return std::make_shared<Tensor>(std::move(x)); }
  /// Runs one half on its device.
  Later run(int device, const Later& x);
  /// Copies from device 0 to device 1: after all work enqueued on either device
  /// before this call, and before all work enqueued later.
  Later move(const Later& x);
  /// Concatenates the parts along dim 0. The host waits for the result.
  Tensor join(const std::vector<Later>& parts);

 private:
  static std::size_t index(int device) {
    return static_cast<std::size_t>(device);
  }
  std::array<std::unique_ptr<Stage>, 2> halves_;
  SharedLedger ledger_;
  // Declared last: the queues end before the layers and the ledger.
  std::array<std::unique_ptr<DeviceQueue>, 2> queues_;
};

/// The pipelined schedule: device 1 works on one split while device 0 works on
/// the next one.
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

/// The reference for both: all layers on one device, in splits of `split_size`
/// rows (0: the whole batch at once).
Tensor forward_in_splits(Module& model, const Tensor& x,
                         std::int64_t split_size);

}  // namespace shardbook::model_parallel
