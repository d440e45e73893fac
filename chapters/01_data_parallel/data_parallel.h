#pragma once

// DataParallel: one process, n devices, a thread per device.
//
//   DataParallel model(module, {gpu0, gpu1, gpu2});
//   Tensor y = model(x);            // scatter, replicate, apply, gather
//   language_loss(y, targets).backward();
//   optimizer.step();               // on gpu0, where the parameters live
//
// Parameters, their gradients and the optimizer live on the main device,
// device_ids[0]. Every forward makes replicas of the module on the others,
// which die with the graph of their outputs. The loss is taken on the gathered
// output, so gradients are those of one device, whatever the split.
//
// A module is used by one thread at a time; its replicas run on a thread each,
// the first on the caller's, with a RankContext on its own device.
//
// torch.nn.parallel: data_parallel.py, scatter_gather.py, replicate.py,
// parallel_apply.py.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/01_data_parallel/value.h"
#include "comm/device_copies.h"
#include "core/module.h"

namespace shardbook::data_parallel {

/// Parameters and gradients travel in buffers that are closed as soon as they
/// hold this many bytes.
constexpr std::int64_t kCoalescedBytes = std::int64_t{10} << 20;

// --- Pure functions ---------------------------------------------------------

/// Rows [begin, end) of each device: q = ceil(n / parts) rows, the last part
/// shorter, empty parts left out. 5 over 4 gives [0,2) [2,4) [4,5). No rows
/// make one empty part. The CEIL rule (torch.chunk).
using RowRange = std::pair<std::int64_t, std::int64_t>;
std::vector<RowRange> ceil_chunks(std::int64_t n, std::int64_t parts);

/// Which tensors travel together: positions, in order, one dtype per chunk; a
/// chunk is closed when it holds `limit_bytes` or more.
std::vector<std::vector<std::size_t>> coalesce(
    const Tensors& tensors, std::int64_t limit_bytes = kCoalescedBytes);

/// The warning about a device with less than 75 % of another's memory; "" when
/// all are alike. Capacity 0 is unlimited.
std::string imbalance_warning(const std::vector<Device>& devices);

// --- The four functions -----------------------------------------------------
// `ledger` (or null) books the copies, also those of the backward.

/// Cuts every tensor of `inputs` along `dim` into CEIL chunks, chunk i on
/// devices[i]; lists and dictionaries are recursed into, other objects shared.
/// Returns one tree per device that has rows, or per device when there are no
/// tensors. Differentiable: the gradients of the chunks are gathered.
///
/// Communication: one scatter per tensor; what is on its device already stays.
/// Throws Error for a scalar tensor, or tensors with different numbers of
/// chunks.
std::vector<Value> scatter(const Value& inputs,
                           const std::vector<Device>& devices,
                           std::int64_t dim = 0,
                           const SharedLedger& ledger = nullptr);

/// Throws Error when a parameter or buffer of `module` is not on `main`.
void check_on_device(Module& module, const Device& main);

using Replicas = std::vector<std::shared_ptr<Module>>;

/// Copies of `module`, one per device. Parameters are broadcast differentiably:
/// backward adds the replicas' gradients, in device order, on devices[0].
/// Buffers are copied. Replica 0 shares storage with `module`, so its writes
/// into buffers stay; those of the other replicas are lost.
///
/// Communication: per coalesced chunk, one broadcast forward and (parameters)
/// one reduce backward. Throws Error when a parameter or buffer is not on
/// devices[0].
Replicas replicate(Module& module, const std::vector<Device>& devices,
                   const SharedLedger& ledger = nullptr);

/// A replica's computation on its inputs.
using Forward = std::function<Value(Module& replica, const Value& inputs)>;
/// Calls the module: a tensor gives a tensor, a list of tensors a list.
Value call_module(Module& module, const Value& inputs);

/// Runs replica i on inputs[i], on devices[i] for the calling rank: the first
/// on the calling thread, the others on threads of their own. Dropout of
/// replica i draws at the rows of its chunk in the whole batch. When replicas
/// throw, the error of the first one is thrown again after all have ended.
/// Replicas live as long as the graph of their outputs.
std::vector<Value> parallel_apply(const Replicas& replicas,
                                  const std::vector<Value>& inputs,
                                  const std::vector<Device>& devices,
                                  const Forward& forward = call_module);

/// Joins the replicas' outputs along `dim` on `output_device`; lists and
/// dictionaries entry by entry. One scalar per device becomes a vector.
/// Differentiable: the gradient is scattered.
///
/// Communication: one gather per tensor, and one scatter in backward. Throws
/// Error for objects other than null, and for outputs that differ in kind.
Value gather(const std::vector<Value>& outputs, const Device& output_device,
             std::int64_t dim = 0, const SharedLedger& ledger = nullptr);

// --- All of it --------------------------------------------------------------

class DataParallel {
 public:
  /// `module` stays the caller's, outlives this object, and lives on
  /// device_ids[0]. `output_device` undefined: device_ids[0]. Warns on stderr
  /// when a device has much less memory than another. Throws Error when no
  /// device, or one twice, is named.
  DataParallel(Module& module, std::vector<Device> device_ids,
               Device output_device = Device(), std::int64_t dim = 0);

  /// One device: the module itself, and nothing else. Throws Error when a
  /// GptBlock recomputes its activations on several devices.
  Tensor operator()(const Tensor& x);
  Value operator()(const Value& inputs, const Forward& forward = call_module);

  Module& module() { return module_; }
  const std::vector<Device>& device_ids() const { return device_ids_; }
  const Device& output_device() const { return output_device_; }
  const SharedLedger& ledger() const { return ledger_; }

 private:
  Module& module_;
  std::vector<Device> device_ids_;
  Device output_device_;
  std::int64_t dim_;
  SharedLedger ledger_;
};

/// The same for a single call.
Value data_parallel(Module& module, const Value& inputs,
                    const std::vector<Device>& device_ids,
                    const Device& output_device = Device(),
                    std::int64_t dim = 0);

}  // namespace shardbook::data_parallel
