#include "chapters/01_data_parallel/data_parallel.h"

#include <exception>
#include <thread>
#include <typeinfo>

#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::data_parallel {
namespace {

/// Returns the same values, with a graph that keeps `replica` alive: a custom
/// function's backward may refer to the module that created it.
Tensor holding(const Tensor& output, const std::shared_ptr<Module>& replica) {
  if (!output.requires_grad()) return output;
  const Tensor held = output.detach();
  autograd::record("replica", {output}, {held},
                   [replica](const Tensors& grads) {
                     autograd::at_end_of_backward([replica] {});
                     return grads;
                   });
  return held;
}

/// Rethrows the first error, and names its replica.
void rethrow_first(const std::vector<std::exception_ptr>& errors,
                   const std::vector<Device>& devices) {
  for (std::size_t i = 0; i < errors.size(); ++i) {
    if (errors[i] == nullptr) continue;
    try {
      std::rethrow_exception(errors[i]);
    } catch (const Error& error) {
      if (typeid(error) != typeid(Error)) throw;
      SB_FAIL("replica ", i, " on ", devices[i].name(), ": ", error.what());
    }
  }
}

/// A recomputed block runs its own backward, which would pass through the
/// broadcast once per block; the broadcast's backward runs once per step.
void check_keeps_activations(Module& module) {
  for (const NamedModule& entry : module.named_modules()) {
    const auto* block = dynamic_cast<const GptBlock*>(entry.module);
    SB_CHECK(block == nullptr || !block->recompute, "DataParallel: '",
             entry.name,
             "' recomputes its activations, which replicas "
             "cannot; turn recomputation off, or use 02_ddp");
  }
}

}  // namespace

Tensors parallel_apply(const Replicas& replicas, const Tensors& inputs,
                       const std::vector<Device>& devices,
                       const Forward& forward) {
  const std::size_t n = replicas.size();
  SB_CHECK(n >= 1 && inputs.size() == n && devices.size() >= n,
           "parallel_apply: ", n, " replicas, ", inputs.size(), " inputs and ",
           devices.size(), " devices");
  RankContext& caller = RankContext::current();
  BatchSlice rows = caller.random.batch;
  std::vector<RankContext*> workers;
  for (std::size_t i = 0; i < n; ++i) {
    workers.push_back(&caller.worker(devices[i]));
    // Dropout draws by global row, as on one device.
    workers[i]->random.batch = rows;
    rows.first += rows.stride * inputs[i].size(0);
  }

  // One thread per replica; this one runs the first.
  Tensors outputs(n);
  std::vector<std::exception_ptr> errors(n);
  const auto apply = [&](std::size_t i) {
    RankContext::Scope scope(*workers[i]);
    try {
      outputs[i] = holding(forward(*replicas[i], inputs[i]), replicas[i]);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 1; i < n; ++i) threads.emplace_back(apply, i);
    apply(0);
  }
  rethrow_first(errors, devices);
  // Later random operations continue the replicas' count.
  caller.random.next_op = workers[0]->random.next_op;
  return outputs;
}

DataParallel::DataParallel(Module& module, std::vector<Device> device_ids,
                           Device output_device)
    : module_(module),
      device_ids_(std::move(device_ids)),
      ledger_(std::make_shared<CopyLedger>()) {
  SB_CHECK(!device_ids_.empty(),
           "DataParallel: device_ids is empty; name at least one device");
  for (std::size_t i = 0; i < device_ids_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      SB_CHECK(device_ids_[i] != device_ids_[j], "DataParallel: device_ids[", j,
               "] and device_ids[", i, "] are the same device, ",
               device_ids_[i].name());
    }
  }
  output_device_ = output_device.defined() ? output_device : device_ids_[0];
}

Tensor DataParallel::operator()(const Tensor& x, const Forward& forward) {
  // One device: nothing to scatter, nothing to replicate.
  if (device_ids_.size() == 1) return forward(module_, x);

  check_keeps_activations(module_);
  // Scatter, replicate, apply, gather.
  const Tensors chunks = scatter(x, device_ids_, ledger_);
  const std::vector<Device> used(
      device_ids_.begin(),
      device_ids_.begin() + static_cast<std::ptrdiff_t>(chunks.size()));
  const Replicas replicas = replicate(module_, used, ledger_);
  const Tensors outputs = parallel_apply(replicas, chunks, used, forward);
  return gather(outputs, output_device_, ledger_);
}

}  // namespace shardbook::data_parallel
