#pragma once

// Messages between stages.
//
//   Mailbox mailbox(world, num_stages);
//   mailbox.send_forward(run.outputs, b, s + 1, /*to=*/rank + 1);
//   Tensors grads = mailbox.receive_backward(spec, b, s + 1, rank + 1);
//   ...
//   mailbox.flush();                     // all messages are received

#include <deque>
#include <map>
#include <string>

#include "chapters/common/pipeline/stages.h"
#include "comm/process_group.h"

namespace shardbook {

/// Sends values and gradients between stages. Both ends know the shapes
/// (trace_shapes). A value for a stage of the same rank is handed over without
/// a message. A value for another rank stays in memory until that rank has
/// received it, and counts as communication from the send on.
class Mailbox {
 public:
  Mailbox(ProcessGroup& world, int num_stages)
      : world_(world), num_stages_(num_stages) {}

  /// Values for stage `stage`, which is at rank `to`.
  void send_forward(const Tensors& values, int micro_batch, int stage, int to);
  /// The inputs of stage `stage`.
  Tensors receive_forward(const LayerInput& spec, int micro_batch, int stage,
                          int from);
  /// Gradients of the inputs of stage `stage`; `spec` says which are sent.
  void send_backward(const Tensors& grads, const LayerInput& spec,
                     int micro_batch, int stage, int to);
  Tensors receive_backward(const LayerInput& spec, int micro_batch, int stage,
                           int from);
  /// Waits until everything has been received.
  void flush();

 private:
  void send(const Tensor& value, int to, int tag, const std::string& label);
  Tensor receive(const ValueSpec& spec, int from, int tag,
                 const std::string& label);
  int tag(int micro_batch, int stage, bool is_backward) const {
    return (micro_batch * num_stages_ + stage) * 2 + (is_backward ? 1 : 0);
  }

  struct Sent {
    int to = 0;
    Work work;
    Tensor value;
  };
  ProcessGroup& world_;
  int num_stages_;
  std::deque<Sent> sent_;
  /// Between stages of this rank, by tag.
  std::map<int, std::deque<Tensor>> handed_over_;
};

/// Bytes of the values (forward) or of their gradients (backward) that cross a
/// cut, for one micro-batch.
double forward_bytes(const LayerInput& spec);
double backward_bytes(const LayerInput& spec);

}  // namespace shardbook
