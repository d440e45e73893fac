// The examples in the comments of the DTensor chapter's headers, as code that
// compiles.

#include <memory>

#include "chapters/11_dtensor/dtensor.h"
#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/parallelize.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "comm/device_mesh.h"
#include "core/optim.h"

namespace shardbook::dtensor::examples {

// --- chapters/11_dtensor/placement.h
void placement() {
  local_part({5}, {shard(0), shard(0)}, {2, 2}, {0, 1});  // row 2
}

// --- chapters/11_dtensor/mesh.h
void mesh(ProcessGroup& world) {
  DeviceMesh devices(world, Topology({"dp", "tp"}, {2, 4}));
  Mesh mesh(devices);
  Mesh tp(devices, {"tp"});
  Mesh nested(devices, {"tp", "dp"});
}

// --- chapters/11_dtensor/dtensor.h
void dtensor(const Tensor& whole, const Mesh& mesh) {
  DTensor x = distribute_tensor(whole, mesh, {shard(0), replicate()});
  DTensor y = x.redistribute({replicate(), shard(1)});
  y.full_tensor();
}

// --- chapters/11_dtensor/dtensor_ops.h
void ops(const DTensor& x, const Parameter& w1, const Parameter& b1,
         const Parameter& w2, const Parameter& b2) {
  const DTensor hidden = gelu(add(matmul(x, w1()), b1()));
  const DTensor y = matmul(hidden, w2());
  add(y.redistribute({replicate()}), b2());
}

// --- chapters/11_dtensor/parallelize.h
void parallelize(Module& gpt, DeviceMesh& devices,
                 const OptimizerOptions& options) {
  parallelize_module(gpt, Mesh(devices, {"tp"}),
                     {{"transformer.h.*.attn", pairwise()},
                      {"transformer.h.*.mlp", pairwise()}});
  auto optimizer = make_optimizer("adamw", gpt.parameters(), options);
}

// --- chapters/11_dtensor/placement_picture.h
void picture() {
  picture_text({held_by("w", {4, 4}, {shard(0), replicate()}, {2, 2})});
}

}  // namespace shardbook::dtensor::examples
