#include "chapters/12_sequence_parallel/ring_exchange.h"

#include <cstddef>
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

bool ranks_are_alike(const sim::Cluster& cluster,
                     const std::vector<std::vector<int>>& rings,
                     Layout layout) {
  if (layout != Layout::kZigzag || !cluster.mesh.empty()) return false;
  int num_inside = 0, num_hops = 0;
  for (const std::vector<int>& ring : rings) {
    for (std::size_t i = 0; i < ring.size(); ++i, ++num_hops) {
      const int next = ring[(i + 1) % ring.size()];
      num_inside += cluster.node_of(ring[i]) == cluster.node_of(next);
    }
  }
  return num_inside == 0 || num_inside == num_hops;
}

}  // namespace shardbook::sequence_parallel
