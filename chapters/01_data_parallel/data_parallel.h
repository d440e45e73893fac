#pragma once

// DataParallel: one process, d devices, a thread per device.
//
//   DataParallel model(module, {gpu0, gpu1, gpu2});
//   Tensor y = model(x);            // scatter, replicate, apply, gather
//   language_loss(y, targets).backward();
//   optimizer.step();               // on gpu0, where the parameters live
//
// Parameters, their gradients and the optimizer live on the main device,
// device_ids[0]. Every forward creates replicas of the module on the others;
// they live as long as the graph of their outputs. The loss is computed on the
// gathered output, so gradients equal one device's, whatever the split.
//
// A module is used by one thread at a time; its replicas run on a thread each,
// the first on the caller's, with a RankContext on its own device.
//
// torch.nn.parallel: data_parallel.py, scatter_gather.py, replicate.py,
// parallel_apply.py.

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/device_copies.h"
#include "core/module.h"

namespace shardbook::data_parallel {

/// Parameters and gradients travel in buffers that are closed as soon as they
/// hold this many bytes.
constexpr std::int64_t kCoalescedBytes = std::int64_t{10} << 20;

// --- Pure functions ---------------------------------------------------------

/// Rows [begin, end) of each device: ceil(n / parts) rows, the last part
/// shorter, empty parts left out. 5 over 4 gives [0,2) [2,4) [4,5). No rows
/// make one empty part. The CEIL rule (torch.chunk).
using RowRange = std::pair<std::int64_t, std::int64_t>;
std::vector<RowRange> ceil_chunks(std::int64_t n, std::int64_t parts);

/// Which tensors travel together: positions, in order, one dtype per chunk; a
/// chunk is closed when it holds `limit_bytes` or more.
std::vector<std::vector<std::size_t>> coalesce(
    const Tensors& tensors, std::int64_t limit_bytes = kCoalescedBytes);

// --- The four functions -----------------------------------------------------
// `ledger` (or null) records the copies, also in backward.

/// Cuts the rows of `x` into CEIL chunks, chunk i on devices[i]. Returns a
/// tensor per device that has rows. Differentiable: the gradients of the chunks
/// are gathered.
///
/// Communication: one scatter; the chunk of x's own device is a view.
Tensors scatter(const Tensor& x, const std::vector<Device>& devices,
                const SharedLedger& ledger = nullptr);

using Replicas = std::vector<std::shared_ptr<Module>>;

/// Copies of `module`, one per device. Parameters are broadcast differentiably:
/// backward adds the replicas' gradients, in device order, on devices[0].
/// Buffers are copied. Replica 0 shares storage with `module`, so its writes
/// into buffers stay; the other replicas' writes are lost.
///
/// Communication: per coalesced chunk, one broadcast forward and (parameters)
/// one reduce backward. Throws Error when a parameter or buffer is not on
/// devices[0].
Replicas replicate(Module& module, const std::vector<Device>& devices,
                   const SharedLedger& ledger = nullptr);

/// A replica's computation on its rows.
using Forward = std::function<Tensor(Module& replica, const Tensor& x)>;
inline Tensor call_module(Module& module, const Tensor& x) { return module(x); }

/// Runs replica i on inputs[i], on devices[i] for the calling rank: the first
/// on the calling thread, the others on threads of their own. Dropout of
/// replica i draws at the rows of its chunk in the whole batch. If replicas
/// throw, the first one's error is rethrown after all have ended. Replicas live
/// as long as the graph of their outputs.
Tensors parallel_apply(const Replicas& replicas, const Tensors& inputs,
                       const std::vector<Device>& devices,
                       const Forward& forward = call_module);

/// Joins the rows of the replicas' outputs on `device`. One scalar per device
/// becomes a vector. Differentiable: the gradient is scattered.
///
/// Communication: one gather, and one scatter in backward. Throws Error for
/// outputs that differ in more than their number of rows.
Tensor gather(Tensors outputs, const Device& device,
              const SharedLedger& ledger = nullptr);

// --- All of it --------------------------------------------------------------

class DataParallel {
 public:
  /// `module` stays the caller's, outlives this object, and lives on
  /// device_ids[0]. Outputs meet on `output_device`, by default device_ids[0].
  /// Throws Error for an empty list or a repeated device.
  DataParallel(Module& module, std::vector<Device> device_ids,
               Device output_device = Device());

  /// On one device, only calls the module. Throws Error when a GptBlock
  /// recomputes its activations on several devices.
  Tensor operator()(const Tensor& x, const Forward& forward = call_module);

  const std::vector<Device>& device_ids() const { return device_ids_; }
  const SharedLedger& ledger() const { return ledger_; }

 private:
  Module& module_;
  std::vector<Device> device_ids_;
  Device output_device_;
  SharedLedger ledger_;
};

}  // namespace shardbook::data_parallel
