#include "chapters/common/pipeline/mailbox.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/tensor_storage.h"

namespace shardbook {
namespace {

std::string spot(int micro_batch, int stage) {
  return "micro-batch " + std::to_string(micro_batch) + " stage " +
         std::to_string(stage);
}

double bytes_of(const ValueSpec& value) {
  return static_cast<double>(shape_numel(value.shape)) *
         static_cast<double>(dtype_bytes(value.dtype));
}

}  // namespace

void Mailbox::send(const Tensor& value, int to, int tag,
                   const std::string& label) {
  if (to == world_.rank()) {
    handed_over_[tag].push_back(value);
    return;
  }
  // The message occupies memory until the receiver has it
  set_memory_kind(value, MemoryKind::kCommunication);
  // Forget finished messages to this rank; flush waits for the others
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(),
                             [&](const Sent& each) {
                               return each.to == to && each.work.done();
                             }),
              sent_.end());
  Work work = world_.send(value, to, tag, label);
  sent_.push_back({to, std::move(work), value});
}

Tensor Mailbox::receive(const ValueSpec& spec, int from, int tag,
                        const std::string& label) {
  if (from == world_.rank()) {
    auto& waiting = handed_over_[tag];
    SB_CHECK(!waiting.empty(), "receive of ", label,
             ": not computed yet; the schedule reads it too early");
    Tensor value = waiting.front();
    waiting.pop_front();
    if (waiting.empty()) handed_over_.erase(tag);
    return value;
  }
  const MemoryScope kind(MemoryKind::kActivation);
  Tensor value = Tensor::empty(spec.shape, {spec.dtype, Device()});
  world_.recv(value, from, tag, label).wait();
  return value;
}

void Mailbox::send_forward(const Tensors& values, int micro_batch, int stage,
                           int to) {
  for (const Tensor& value : values) {
    send(value.detach(), to, tag(micro_batch, stage, false),
         "activations " + spot(micro_batch, stage));
  }
}

Tensors Mailbox::receive_forward(const LayerInput& spec, int micro_batch,
                                 int stage, int from) {
  Tensors values;
  for (const ValueSpec& value : spec.values) {
    values.push_back(receive(value, from, tag(micro_batch, stage, false),
                             "activations " + spot(micro_batch, stage)));
  }
  return values;
}

void Mailbox::send_backward(const Tensors& grads, const LayerInput& spec,
                            int micro_batch, int stage, int to) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!spec.values[i].needs_grad) continue;
    Tensor grad = grads[i];
    if (!grad.defined()) {
      grad =
          Tensor::zeros(spec.values[i].shape, {spec.values[i].dtype, Device()});
    }
    send(grad, to, tag(micro_batch, stage, true),
         "gradients " + spot(micro_batch, stage));
  }
}

Tensors Mailbox::receive_backward(const LayerInput& spec, int micro_batch,
                                  int stage, int from) {
  Tensors grads;
  for (const ValueSpec& value : spec.values) {
    grads.push_back(value.needs_grad
                        ? receive(value, from, tag(micro_batch, stage, true),
                                  "gradients " + spot(micro_batch, stage))
                        : Tensor());
  }
  return grads;
}

void Mailbox::flush() {
  for (Sent& each : sent_) each.work.wait();
  sent_.clear();
}

double forward_bytes(const LayerInput& spec) {
  double bytes = 0;
  for (const ValueSpec& value : spec.values) bytes += bytes_of(value);
  return bytes;
}

double backward_bytes(const LayerInput& spec) {
  double bytes = 0;
  for (const ValueSpec& value : spec.values) {
    if (value.needs_grad) bytes += bytes_of(value);
  }
  return bytes;
}

}  // namespace shardbook
