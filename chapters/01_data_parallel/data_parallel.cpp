#include "chapters/01_data_parallel/data_parallel.h"

#include <cstdio>
#include <exception>
#include <thread>
#include <typeinfo>

#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::data_parallel {
namespace {

/// The same values, whose graph keeps `replica` alive: the backward of a custom
/// function may refer to the module that made it.
Value holding(const Value& value, const std::shared_ptr<Module>& replica) {
  if (value.is_list()) {
    Value::List list;
    for (const Value& entry : value.list()) {
      list.push_back(holding(entry, replica));
    }
    return list;
  }
  if (value.is_dictionary()) {
    Value::Dictionary dictionary;
    for (const auto& [key, entry] : value.dictionary()) {
      dictionary[key] = holding(entry, replica);
    }
    return dictionary;
  }
  if (!value.is_tensor() || !value.tensor().requires_grad()) return value;
  const Tensor held = value.tensor().detach();
  autograd::record("replica", {value.tensor()}, {held},
                   [replica](const Tensors& grads) {
                     autograd::at_end_of_backward([replica] {});
                     return grads;
                   });
  return held;
}

/// Rows that a replica's inputs have: dim 0 of the first tensor.
std::int64_t num_rows(const Value& inputs) {
  const Tensors tensors = tensors_of(inputs);
  return tensors.empty() || tensors[0].ndim() == 0 ? 0 : tensors[0].size(0);
}

/// Throws the first error again, with the replica it comes from.
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

/// A recomputed block runs a backward of its own, which would run through the
/// broadcast, once per block; the broadcast's backward runs once per step.
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

std::string imbalance_warning(const std::vector<Device>& devices) {
  constexpr double kLeastShare = 0.75;
  auto capacity = [](const Device& device) {
    return device.capacity_bytes() == 0
               ? 1e300
               : static_cast<double>(device.capacity_bytes());
  };
  for (const Device& small : devices) {
    for (const Device& large : devices) {
      if (capacity(small) >= kLeastShare * capacity(large)) continue;
      const std::string more =
          large.capacity_bytes() == 0
              ? "memory without limit"
              : std::to_string(large.capacity_bytes()) + " bytes";
      return "DataParallel: " + small.name() + " has " +
             std::to_string(small.capacity_bytes()) +
             " bytes of memory, less than 75 % of " + large.name() +
             ", which has " + more +
             "; every device gets the same share of the batch";
    }
  }
  return "";
}

Value call_module(Module& module, const Value& inputs) {
  if (inputs.is_tensor()) return module(inputs.tensor());
  SB_CHECK(inputs.is_list(), module.type_name(),
           ": takes a tensor or a list of tensors, given ", inputs.kind_name(),
           "; pass a Forward that unpacks it");
  Tensors tensors;
  for (const Value& entry : inputs.list()) tensors.push_back(entry.tensor());
  const Tensors outputs = module(tensors);
  return Value::List(outputs.begin(), outputs.end());
}

std::vector<Value> parallel_apply(const Replicas& replicas,
                                  const std::vector<Value>& inputs,
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
    // Dropout draws at global rows, as one device would.
    workers[i]->random.batch = rows;
    rows.first += rows.stride * num_rows(inputs[i]);
  }

  // One thread per replica; this one runs the first.
  std::vector<Value> outputs(n);
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
  // Random operations after the replicas count on from theirs.
  caller.random.next_op = workers[0]->random.next_op;
  return outputs;
}

DataParallel::DataParallel(Module& module, std::vector<Device> device_ids,
                           Device output_device, std::int64_t dim)
    : module_(module),
      device_ids_(std::move(device_ids)),
      output_device_(std::move(output_device)),
      dim_(dim),
      ledger_(std::make_shared<CopyLedger>()) {
  SB_CHECK(!device_ids_.empty(),
           "DataParallel: device_ids is empty; name at least one device");
  for (std::size_t i = 0; i < device_ids_.size(); ++i) {
    SB_CHECK(device_ids_[i].defined(), "DataParallel: device_ids[", i,
             "] is no device");
    for (std::size_t j = 0; j < i; ++j) {
      SB_CHECK(device_ids_[i] != device_ids_[j], "DataParallel: device_ids[", j,
               "] and device_ids[", i, "] are the same device, ",
               device_ids_[i].name());
    }
  }
  if (!output_device_.defined()) output_device_ = device_ids_[0];
  const std::string warning = imbalance_warning(device_ids_);
  if (!warning.empty()) std::fprintf(stderr, "warning: %s\n", warning.c_str());
}

Tensor DataParallel::operator()(const Tensor& x) {
  return (*this)(Value(x)).tensor();
}

Value DataParallel::operator()(const Value& inputs, const Forward& forward) {
  check_on_device(module_, device_ids_[0]);
  // One device: nothing to scatter, nothing to replicate.
  if (device_ids_.size() == 1) {
    Value output = forward(module_, inputs);
    if (output_device_ == device_ids_[0]) return output;
    return gather({output}, output_device_, dim_, ledger_);
  }

  check_keeps_activations(module_);
  // Scatter, replicate, apply, gather.
  const std::vector<Value> chunks = scatter(inputs, device_ids_, dim_, ledger_);
  const std::vector<Device> used(
      device_ids_.begin(),
      device_ids_.begin() + static_cast<std::ptrdiff_t>(chunks.size()));
  const Replicas replicas = replicate(module_, used, ledger_);
  const std::vector<Value> outputs =
      parallel_apply(replicas, chunks, used, forward);
  return gather(outputs, output_device_, dim_, ledger_);
}

Value data_parallel(Module& module, const Value& inputs,
                    const std::vector<Device>& device_ids,
                    const Device& output_device, std::int64_t dim) {
  return DataParallel(module, device_ids, output_device, dim)(inputs);
}

}  // namespace shardbook::data_parallel
