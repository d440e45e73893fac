// Copies activations from the first device to the second, and gradients back.

#include <utility>

#include "chapters/04_model_parallel/model_parallel.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/stream.h"

namespace shardbook::model_parallel {
namespace {

// Copies `from` to another device and records one message in the ledger.
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

/// State shared in backward by the two ends of a crossing.
struct Crossing {
  Tensor place;   ///< receives the gradient, on x's device
  Event arrived;  ///< the gradient is in `place`
};

// Runs on the gradient's device while the other device computes.
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
  // `grad` may be freed when this function returns, so the copy must be done.
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
  // Two nodes, one per device: each device waits in its own node.
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
