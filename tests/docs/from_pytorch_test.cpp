// The book's column of chapters/from_pytorch.md compiles, and runs on two
// ranks. Each line is a function that begins with the same names.

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/lesson.h"
#include "chapters/common/models/layer_list.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"
#include "comm/process_group.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/device_queue.h"
#include "core/inplace.h"
#include "core/layers.h"
#include "core/ops.h"
#include "core/optim.h"

namespace shardbook {
namespace {

struct Names {
  explicit Names(ProcessGroup& group) : dp(group) {}

  ProcessGroup& dp;
  int n = dp.size(), next = 1 - dp.rank();
  InitOptions init;
  Tensor x = Tensor::full({6, 6}, 0.5), z = x.clone(), g = x.clone();
  Tensor w = make_parameter("w", {6, 6}, 0.02, init);
  Tensor y = matmul(x, w), loss = sum(y);
  Tensor all = Tensor::zeros({12, 6}), piece = Tensor::zeros({3, 6});
  Tensor logits = Tensor::zeros({2, 3, 6}),
         t = Tensor::zeros({2, 3}, {DType::kI64, {}});
  Tensors xs = {x, z};
  Linear linear_model{"model", 6, 6, init};
  Module& model = linear_model;
  std::unique_ptr<LayerList> layers = layers_of(lesson::config());
  std::unique_ptr<Optimizer> sgd =
      make_optimizer("sgd", model.parameters(), {});
  std::function<Tensors(const Tensors&)> forward = [](const Tensors& in) {
    return Tensors{scale(in[0], 2)};
  };
  autograd::BackwardFn backward = forward;
  Work for_recv = dp.send(x, next);  // what the line with recv receives
  DeviceMesh mesh{dp, Topology({"dp", "tp"}, {2, 1})};
  Device device = Device::cpu(1);
  QueueEvent event;
  DeviceQueue queue{device};
};

struct Line {
  int number;
  void (*run)(ProcessGroup&);
};

template <typename L>
void run(ProcessGroup& dp) {
  L(dp).run();
}

#include "from_pytorch_lines.inc"

}  // namespace
}  // namespace shardbook

int main() {
  using namespace shardbook;
  for (const Line& line : kLines) {
    try {
      run_ranks(2, line.run);
    } catch (const Error& error) {
      std::printf("chapters/from_pytorch.md:%d: %s\n", line.number,
                  error.what());
      return 1;
    }
  }
  std::printf("%zu lines\n", kLines.size());
  return kLines.size() > 70 ? 0 : 1;
}
