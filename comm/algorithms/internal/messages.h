#pragma once

// Small steps that the algorithms share.

#include "comm/internal/reduce.h"
#include "comm/process_group.h"

namespace shardbook::algorithms {

/// Elements begin..end-1 of a tensor, as a view of one dim.
inline Tensor range(const Tensor& tensor, std::int64_t begin,
                    std::int64_t end) {
  return tensor.flat_view(begin, {end - begin});
}

/// Room for `numel` elements that arrive.
inline Tensor room_like(const Tensor& tensor, std::int64_t numel) {
  const MemoryScope scope(MemoryKind::kCommunication);
  return Tensor::empty({numel}, tensor.options());
}

/// Sends and receives at the same time: if both sides did one after the other,
/// they would deadlock.
inline void swap_messages(ProcessGroup& group, const Tensor& outgoing, int to,
                          const Tensor& incoming, int from) {
  Work received = group.recv(incoming, from);
  Work sent = group.send(outgoing, to);
  received.wait();
  sent.wait();
}

/// target = target op source. bf16 and f16 round at every step; the threads
/// backend rounds once.
inline void combine(const Tensor& target, const Tensor& source, ReduceOp op) {
  if (target.is_meta()) return;
  internal::accumulate(target.dtype(), op, target.raw(), source.raw(),
                       target.numel());
}

}  // namespace shardbook::algorithms
