#include "chapters/12_sequence_parallel/ring_exchange.h"

#include <utility>

#include "core/context.h"

namespace shardbook::sequence_parallel {

Hop::Hop(ProcessGroup& cp, const Tensors& leaving, int first_tag,
         const std::string& label)
    : leaving_(leaving) {
  const MemoryScope kind(MemoryKind::kCommunication);
  const int next = (cp.rank() + 1) % cp.size();
  const int before = (cp.rank() + cp.size() - 1) % cp.size();
  for (const Tensor& tensor : leaving) {
    const int tag = first_tag++;
    arriving_.push_back(tensor.empty_like());
    works_.push_back(cp.send(tensor, next, tag, label));
    works_.push_back(cp.recv(arriving_.back(), before, tag, label));
  }
}

Tensors Hop::wait() {
  for (Work& work : works_) work.wait();
  works_.clear();
  leaving_.clear();
  return std::exchange(arriving_, {});
}

}  // namespace shardbook::sequence_parallel
