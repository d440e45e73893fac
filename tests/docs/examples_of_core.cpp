// The examples in the comments of core's headers, as code that compiles.
// docs_test.cpp looks for each line of an example below its header's name.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/attention_block.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/device.h"
#include "core/device_graph.h"
#include "core/device_queue.h"
#include "core/gpus.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/matmul.h"
#include "core/layers.h"
#include "core/module.h"
#include "core/ops.h"
#include "core/optim.h"
#include "core/rope.h"
#include "core/safetensors.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "core/tensor_storage.h"
#include "core/weight_gradients.h"
#include "core/xtensor.h"

namespace shardbook::examples {

// --- core/autograd.h
Tensor square(const Tensor& x) {
  Tensor y = mul(x, x);
  autograd::record("square", {x}, {y}, [x](const Tensors& grads) {
    return Tensors{mul(scale(x, 2), grads[0])};
  });
  return y;
}

// --- core/context.h
void context() {
  RankContext context(Device::cpu(3), /*rank=*/3);
  RankContext::Scope scope(context);
  Tensor x = Tensor::zeros({2, 2});
}

// --- core/device.h
void device() {
  Device gpu = Device::cpu(0, /*capacity_bytes=*/1 << 30);
  Tensor x = Tensor::zeros({4, 8}, {DType::kF32, gpu});
  gpu.memory().current(MemoryKind::kActivation);
}

// --- core/device_graph.h
void device_graph(const Tensor& x, const Tensor& w, const Tensor& batch,
                  const Tensor& next) {
  Tensor y;
  const DeviceGraph graph([&] { y = gelu(matmul(x, w)); });
  x.copy_from(batch), graph.launch();
  x.copy_from(next), graph.launch();
}

// --- core/device_queue.h
void device_queue(Linear& layer1, Linear& layer2, const Tensor& x) {
  Tensor a, b;
  DeviceQueue gpu0(Device::cpu(0)), gpu1(Device::cpu(1));
  gpu0.enqueue([&] { a = layer1(x); });
  QueueEvent done;
  done.record(gpu0);
  done.wait(gpu1);
  gpu1.enqueue([&] { b = layer2(a); });
  gpu1.synchronize();
}

// --- core/gpus.h
void gpus() {
  if (why_no_gpu().empty()) {
    Tensor x = Tensor::zeros({8}, {DType::kF32, Device::cuda(0)});
  }
}

// --- core/kernels/kernel_context.h
void kernel_context(const float* a, const float* b, float* c) {
  using namespace kernels;
  KernelContext context;
  MatmulArgs args;
  args.m = 64, args.n = 32, args.k = 16;
  kernels::matmul(context, DType::kF32, args, a, b, c);
}

// --- core/module.h
class Block : public ModuleOf<Block> {
 public:
  Tensor forward(const Tensor& x) override { return fc2(gelu(fc1(x))); }
  void members(MemberVisitor& visit) override {
    visit.module("fc1", fc1);
    visit.module("fc2", fc2);
  }
  Linear fc1, fc2;
};

// --- core/optim.h
void optim(Module& model, const OptimizerOptions& options, Tensor loss) {
  auto optimizer = make_optimizer("adamw", model.parameters(), options);
  loss.backward();
  clip_grad_norm(model.parameters(), 1.0);
  optimizer->step();
  model.clear_grad();
}

// --- core/rope.h
void rotary_positions(Tensor qkv) {
  const std::vector<std::int64_t> positions = {0, 1, 2, 3};
  const Tensor table = rope_table(positions, /*head_dim=*/64, 10000.0, {});
  qkv = rope(qkv, table, /*heads=*/12, 64);  // q and k of [q | k | v]
}

// --- core/safetensors.h
void safetensors(char* weights) {
  SafetensorsFile file = SafetensorsFile::open("model.safetensors");
  const SafetensorsEntry& entry = file.find("wte.weight");
  std::memcpy(weights, file.data(entry), entry.end - entry.begin);
}

// --- core/attention_block.h
void attention_blocks(const Tensor& q, const Tensor& k0, const Tensor& v0,
                      const Tensor& k1, const Tensor& v1,
                      const AttentionBlock& block0,
                      const AttentionBlock& block1,
                      const AttentionOptions& options) {
  const AttentionDraws draws = next_attention_draws();
  AttentionSums sums = attention_block(q, k0, v0, block0, options, draws);
  merge_attention(sums, 0, attention_block(q, k1, v1, block1, options, draws));
}

// --- core/stream.h
void stream(Tensor& shard_on_device, const Tensor& shard_on_host) {
  Event ready;
  {
    StreamScope scope(kCopyStream);
    shard_on_device.copy_from(shard_on_host);
    ready.record();
  }
  ready.wait();
}

// --- core/tensor.h
void tensor() {
  Tensor w = Tensor::from_values<float>({1, 2, 3, 4}, {2, 2});
  w.set_requires_grad();
  Tensor loss = sum(matmul(w, w));
  loss.backward();
  w.grad().to_vector<float>();
}

// --- core/tensor_storage.h
void tensor_storage(const Tensor& weight, const Tensor& flat) {
  set_data(weight, flat.flat_view(0, weight.shape()));
  release_storage(flat);
  restore_storage(flat);
}

// --- core/weight_gradients.h
void weight_gradients(const Tensor& loss) {
  WeightGradients later;
  {
    DeferWeightGradients scope(later);
    autograd::backward({loss});
  }
  later.flush();
  later.pop();
}

// --- core/xtensor.h
void xtensor(const Linear& layer) {
  auto w = as_xtensor<float>(layer.weight);
  xt::view(w, xt::all(), xt::range(0, 2)) = 0;
  double mean = xt::mean(w)();
  Tensor rows = from_xtensor(xt::sum(w, {1}));
  save_npy("w.npy", layer.weight);
  (void)mean;
}

}  // namespace shardbook::examples
