#include "chapters/02_ddp/naive_ddp.h"

#include "core/inplace.h"

namespace shardbook::ddp {

NaiveDdp::NaiveDdp(Module& model, ProcessGroup& dp) : model_(model), dp_(dp) {
  for (const Tensor& parameter : model.parameters()) {
    dp.broadcast(parameter, /*root=*/0, "parameter").wait();
  }
}

void NaiveDdp::average_gradients() {
  // Divide, then sum: one message per parameter
  for (const Tensor& parameter : model_.parameters()) {
    const Tensor gradient = parameter.grad();
    scale_into(gradient, gradient, 1.0 / dp_.size());
    dp_.all_reduce(gradient, ReduceOp::kSum, "gradient").wait();
  }
}

}  // namespace shardbook::ddp
