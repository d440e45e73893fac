#pragma once

// A group without peers, for runs on shapes.
//
//   ShapeGroup tp(/*rank=*/1, /*size=*/4, "tp");
//   LayerFactory layers = tensor_parallel::layers(config, tp);
//
// Layers that communicate are built on one to learn the shapes of a rank's
// tensors: calls are recorded in its own ledger, nothing moves, no call waits,
// and no clock runs. Tensors are on meta devices.

#include <string>
#include <vector>

#include "comm/process_group.h"

namespace shardbook {

class ShapeGroup : public ProcessGroup {
 public:
  ShapeGroup(int rank, int size, const std::string& name);

  std::vector<std::string> exchange(const std::string& text) override;
  void set_timeout(std::chrono::milliseconds) override {}
  void abort(const std::string&) override {}

 protected:
  Work do_collective(const CommCall& call, const CommBuffers& buffers) override;
  Work do_send(const Tensor&, const CommCall& call) override;
  Work do_recv(const Tensor&, const CommCall& call) override;
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override;
};

}  // namespace shardbook
