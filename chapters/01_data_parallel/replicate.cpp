// Replicas: a broadcast whose backward is a sum.

#include <map>
#include <unordered_map>

#include "chapters/01_data_parallel/data_parallel.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"
#include "core/tensor_storage.h"

namespace shardbook::data_parallel {
namespace {

using Chunks = std::vector<std::vector<std::size_t>>;

std::int64_t numel_of(const Tensors& tensors,
                      const std::vector<std::size_t>& chunk) {
  std::int64_t numel = 0;
  for (std::size_t i : chunk) numel += tensors[i].numel();
  return numel;
}

/// The chunk, end to end in one buffer; a single tensor is its own buffer.
Tensor pack(const Tensors& tensors, const std::vector<std::size_t>& chunk) {
  const Tensor& first = tensors[chunk[0]];
  if (chunk.size() == 1) return first.flat_view(0, {first.numel()});
  MemoryScope kind(MemoryKind::kCommunication);
  const Tensor buffer =
      Tensor::empty({numel_of(tensors, chunk)}, first.options());
  std::int64_t offset = 0;
  for (std::size_t i : chunk) {
    buffer.flat_view(offset, tensors[i].shape()).copy_from(tensors[i]);
    offset += tensors[i].numel();
  }
  return buffer;
}

/// copies[d][i] is tensors[i] on device d: on device 0 the tensor itself, on
/// the others a view of a received buffer.
std::vector<Tensors> broadcast(const Tensors& tensors,
                               const std::vector<Device>& devices,
                               const std::string& label,
                               const SharedLedger& ledger) {
  std::vector<Tensors> copies(devices.size(), Tensors(tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    copies[0][i] = tensors[i].detach();
  }
  if (devices.size() == 1) return copies;
  for (const auto& chunk : coalesce(tensors)) {
    DeviceCopy copy;
    copy.op = CommOp::kBroadcast;
    copy.devices = devices;
    copy.dtype = tensors[chunk[0]].dtype();
    copy.numel = numel_of(tensors, chunk);
    copy.sent.assign(devices.size(), 0);
    copy.sent[0] = copy.numel * static_cast<std::int64_t>(devices.size() - 1);
    copy.label = label;
    ledger->run(copy, [&] {
      const Tensor buffer = pack(tensors, chunk);
      for (std::size_t d = 1; d < devices.size(); ++d) {
        MemoryScope kind(MemoryKind::kParameter);
        const Tensor arrived =
            Tensor::empty({copy.numel}, {copy.dtype, devices[d]});
        arrived.copy_from(buffer);
        std::int64_t offset = 0;
        for (std::size_t i : chunk) {
          copies[d][i] = arrived.flat_view(offset, tensors[i].shape());
          offset += tensors[i].numel();
        }
      }
    });
  }
  return copies;
}

/// Adds one chunk of the replicas' gradients on the main device. grads[d][i] is
/// replica d's gradient of parameter i; within one chunk, all are defined.
void reduce_chunk(std::vector<Tensors>& grads,
                  const std::vector<std::size_t>& chunk, Tensors& sums,
                  const std::vector<Device>& devices,
                  const SharedLedger& ledger) {
  DeviceCopy copy;
  copy.op = CommOp::kReduce;
  copy.devices = devices;
  copy.dtype = grads[0][chunk[0]].dtype();
  copy.numel = numel_of(grads[0], chunk);
  copy.sent.assign(devices.size(), copy.numel);
  copy.sent[0] = 0;
  copy.label = "gradients";
  ledger->run(copy, [&] {
    for (std::size_t i : chunk) {
      MemoryScope kind(MemoryKind::kGradient);
      sums[i] = grads[0][i].clone();
    }
    // Add in device order: the result must not depend on who is ready first.
    for (std::size_t d = 1; d < devices.size(); ++d) {
      const Tensor packed = pack(grads[d], chunk);
      MemoryScope kind(MemoryKind::kCommunication);
      const Tensor arrived =
          Tensor::empty({copy.numel}, {copy.dtype, devices[0]});
      arrived.copy_from(packed);
      std::int64_t offset = 0;
      for (std::size_t i : chunk) {
        add_into(sums[i], arrived.flat_view(offset, sums[i].shape()));
        offset += sums[i].numel();
      }
    }
  });
}

/// The backward of the broadcast: the sum of the replicas' gradients, on the
/// main device. A parameter that no replica used has no gradient.
Tensors reduce_add(std::vector<Tensors> grads, const Tensors& like,
                   const std::vector<Device>& devices,
                   const SharedLedger& ledger) {
  Tensors used;
  std::vector<std::size_t> used_index;
  for (std::size_t i = 0; i < like.size(); ++i) {
    bool any = false;
    for (const Tensors& of_device : grads) any = any || of_device[i].defined();
    if (!any) continue;
    used.push_back(like[i]);
    used_index.push_back(i);
    for (std::size_t d = 0; d < devices.size(); ++d) {
      if (grads[d][i].defined()) continue;
      MemoryScope kind(MemoryKind::kGradient);
      grads[d][i] =
          Tensor::zeros(like[i].shape(), {like[i].dtype(), devices[d]});
    }
  }
  Tensors sums(like.size());
  if (devices.size() == 1) return grads[0];
  for (std::vector<std::size_t> chunk : coalesce(used)) {
    for (std::size_t& i : chunk) i = used_index[i];
    reduce_chunk(grads, chunk, sums, devices, ledger);
  }
  return sums;
}

/// Broadcasts the trained parameters, and links the copies to them.
std::vector<Tensors> broadcast_with_gradient(const Tensors& parameters,
                                             const std::vector<Device>& devices,
                                             const SharedLedger& ledger) {
  const auto copies = broadcast(parameters, devices, "parameters", ledger);
  if (parameters.empty() || !autograd::needs_grad(parameters)) return copies;
  Tensors outputs;
  for (const Tensors& of_device : copies) {
    outputs.insert(outputs.end(), of_device.begin(), of_device.end());
  }
  autograd::record(
      "replicate", parameters, outputs,
      [parameters, devices, ledger](const Tensors& grads) {
        const std::size_t count = parameters.size();
        std::vector<Tensors> by_device;
        for (std::size_t d = 0; d < devices.size(); ++d) {
          const auto begin =
              grads.begin() + static_cast<std::ptrdiff_t>(d * count);
          devices[d].note_held(MemoryKind::kGradient);
          by_device.emplace_back(begin,
                                 begin + static_cast<std::ptrdiff_t>(count));
        }
        return reduce_add(std::move(by_device), parameters, devices, ledger);
      });
  for (const Tensor& output : outputs) set_stands_for_parameter(output);
  return copies;
}

void check_on_device(Module& module, const Device& main) {
  std::vector<NamedTensor> entries = module.named_parameters();
  for (const NamedTensor& buffer : module.named_buffers()) {
    entries.push_back(buffer);
  }
  for (const NamedTensor& entry : entries) {
    SB_CHECK(entry.tensor.device() == main, "DataParallel: '", entry.name,
             "' is on ", entry.tensor.device().name(),
             "; parameters and buffers live on device_ids[0], ", main.name());
  }
}

}  // namespace

Chunks coalesce(const Tensors& tensors, std::int64_t limit_bytes) {
  struct Open {
    std::vector<std::size_t> chunk;
    std::int64_t bytes = 0;
  };
  Chunks closed;
  std::map<DType, Open> open;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Open& mine = open[tensors[i].dtype()];
    mine.chunk.push_back(i);
    mine.bytes += tensors[i].bytes();
    if (mine.bytes < limit_bytes) continue;
    closed.push_back(std::move(mine.chunk));
    mine = {};
  }
  for (auto& [dtype, rest] : open) {
    if (!rest.chunk.empty()) closed.push_back(std::move(rest.chunk));
  }
  return closed;
}

Replicas replicate(Module& module, const std::vector<Device>& devices,
                   const SharedLedger& given_ledger) {
  const SharedLedger ledger =
      given_ledger ? given_ledger : std::make_shared<CopyLedger>();
  check_on_device(module, devices[0]);
  Tensors trained, fixed;
  for (const Tensor& parameter : module.parameters()) {
    (parameter.requires_grad() ? trained : fixed).push_back(parameter);
  }
  for (const Tensor& buffer : module.buffers()) fixed.push_back(buffer);
  const auto trained_copies = broadcast_with_gradient(trained, devices, ledger);
  const auto fixed_copies = broadcast(fixed, devices, "buffers", ledger);

  Replicas replicas;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    std::unordered_map<const void*, Tensor> copy_of;
    for (std::size_t i = 0; i < trained.size(); ++i) {
      copy_of[trained[i].id()] = trained_copies[d][i];
    }
    for (std::size_t i = 0; i < fixed.size(); ++i) {
      copy_of[fixed[i].id()] = fixed_copies[d][i];
    }
    std::shared_ptr<Module> replica = module.clone();
    replica->replace_tensors(
        [&copy_of](const std::string&, const Tensor& tensor) {
          return copy_of.at(tensor.id());
        });
    replicas.push_back(std::move(replica));
  }
  return replicas;
}

}  // namespace shardbook::data_parallel
