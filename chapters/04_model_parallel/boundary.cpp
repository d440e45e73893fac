#include "chapters/04_model_parallel/boundary.h"

#include <utility>

#include "core/autograd.h"
#include "core/context.h"
#include "core/stream.h"

namespace shardbook::model_parallel {
namespace {

// One message from device to device, on the ledger.
void copy(const Tensor& from, const Tensor& to, const char* label,
          CopyLedger& ledger) {
  DeviceCopy message;
  message.op = CommOp::kSend;
  message.devices = {from.device(), to.device()};
  message.dtype = from.dtype();
  message.numel = from.numel();
  message.sent = {from.numel(), 0};
  message.label = label;
  ledger.run(message, [&] { to.copy_from(from); });
}

/// What the two ends of a crossing know of each other in backward.
struct Crossing {
  Tensor place;   ///< for the gradient, where x is
  Event arrived;  ///< when it is there
};

// Runs where the gradient is. The other device computes meanwhile.
Tensor send_back(const Tensor& grad, Crossing& crossing, const Device& home,
                 CopyLedger& ledger) {
  Tensor place = std::move(crossing.place);
  crossing.place = Tensor();
  if (!place.defined()) {
    // The second backward of a graph that was retained
    place = Tensor::empty(grad.shape(), {grad.dtype(), home});
  }
  Event computed;
  computed.record();
  {
    const StreamScope copies(kCopyStream);
    computed.wait();
    copy(grad, place, "gradients", ledger);
    crossing.arrived.record();
  }
  // The gradient goes when this function returns.
  crossing.arrived.wait();
  return place;
}

}  // namespace

Tensor cross(const Tensor& x, const Device& to, const SharedLedger& ledger) {
  const auto crossing = std::make_shared<Crossing>();
  if (autograd::needs_grad({x})) {
    const MemoryScope kind(MemoryKind::kCommunication);
    crossing->place = Tensor::empty(x.shape(), x.options());
  }
  // Two nodes, one per device: each waits on its own side.
  const Tensor sent = x.detach();
  autograd::record("arrive", {x}, {sent}, [crossing](const Tensors& grads) {
    crossing->arrived.wait();
    return grads;
  });
  const Tensor y = Tensor::empty(x.shape(), {x.dtype(), to});
  copy(sent, y, "activations", *ledger);
  autograd::record(
      "cross", {sent}, {y},
      [crossing, ledger, home = x.device()](const Tensors& grads) {
        return Tensors{send_back(grads[0], *crossing, home, *ledger)};
      });
  return y;
}

Tensor send_labels(const Tensor& labels, const Device& to,
                   const SharedLedger& ledger) {
  const MemoryScope kind(MemoryKind::kInput);
  const Tensor moved = Tensor::empty(labels.shape(), {labels.dtype(), to});
  copy(labels, moved, "labels", *ledger);
  return moved;
}

}  // namespace shardbook::model_parallel
