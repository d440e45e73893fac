// DataParallel on one screen: one process, a thread per device. The batch is
// cut, the model is copied, and the outputs come together on the main device.
//
//   ./shardbook lesson data_parallel
// Needed: 00_single_device. Next: 02_ddp.

#include <thread>

#include "chapters/common/lesson.h"
#include "core/context.h"

namespace shardbook::data_parallel {

/// Copies `x`, and counts its bytes and those of its gradient on the way back.
inline Tensor copy(const Tensor& x, const Device& to, double& bytes) {
  if (x.device() == to) return x;
  bytes += static_cast<double>(x.bytes()) * (x.requires_grad() ? 2 : 1);
  return to_device(x, to);
}

// --- the strategy
/// Runs `model` on all devices; its parameters are on devices[0].
inline Tensor forward(Module& model, const Tensor& inputs,
                      const std::vector<Device>& devices, double& bytes) {
  const std::size_t n = devices.size();
  const auto rows = inputs.size(0) / static_cast<std::int64_t>(n);
  std::vector<std::unique_ptr<Module>> replicas;
  Tensors pieces, outputs(n);
  for (std::size_t i = 0; i < n; ++i) {
    // Scatter: device i takes its rows
    const auto first = static_cast<std::int64_t>(i) * rows;
    pieces.push_back(
        copy(slice(inputs, 0, first, first + rows), devices[i], bytes));
    // Replicate: backward copies the gradients back, and adds them up
    replicas.push_back(model.clone());
    replicas[i]->replace_tensors([&](const std::string&, const Tensor& w) {
      return copy(w, devices[i], bytes);
    });
  }
  // Apply: a thread per device
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      RankContext context(devices[i]);
      const RankContext::Scope scope(context);
      outputs[i] = (*replicas[i])(pieces[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Gather: the loss is taken of the whole output, as on one device
  for (Tensor& output : outputs) output = copy(output, devices[0], bytes);
  return concat(outputs, 0);
}
// --- end

inline lesson::Result train(int num_devices) {
  // 1. The model is on the main device, and so is the optimizer
  Gpt model(lesson::config(), lesson::init());
  const auto optimizer = lesson::sgd(model.parameters());
  std::vector<Device> devices = {RankContext::current().device};
  while (static_cast<int>(devices.size()) < num_devices) {
    devices.push_back(Device::cpu(static_cast<int>(devices.size())));
  }
  lesson::Result result;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Forward on all devices; everything else as on one
    const Batch batch = lesson::batch(step);
    const Tensor loss = language_loss(
        forward(model, batch.inputs, devices, result.bytes), batch.targets);
    loss.backward();
    optimizer->step();
    model.clear_grad();
    result.loss = loss.item();
  }
  result.peak_bytes = static_cast<double>(devices[0].memory().peak_total);
  result.weights = model.named_parameters();
  return result;
}

/// Ten steps send the weights and their gradients to and from every other
/// device, its samples' tokens, and their logits and gradients.
inline double bill(int devices) {
  const double tokens = lesson::num_tokens() / devices;
  const double logits =
      tokens * static_cast<double>(lesson::config().vocab_size);
  return lesson::kSteps * (devices - 1) *
         (2 * lesson::num_parameters() + tokens + 2 * logits) * 8;
}

inline lesson::Lesson this_lesson(int devices = 4) {
  return {/*ranks=*/{1}, [=](ProcessGroup&) { return train(devices); },
          [=](int /*rank*/, int /*ranks*/) { return bill(devices); }};
}

}  // namespace shardbook::data_parallel

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::data_parallel::this_lesson()); }
#endif
