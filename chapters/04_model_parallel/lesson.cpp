// Model parallelism on one screen: the first layers on one device, the others
// on another. In splits, both devices work at the same time.
//
//   ./shardbook lesson model_parallel
// Needed: 00_single_device. Next: 05_gpipe.

#include "chapters/common/lesson.h"
#include "chapters/common/pipeline/stages.h"
#include "core/context.h"
#include "core/device_queue.h"

namespace shardbook::model_parallel {

// --- the strategy
/// Maps inputs on device 0 to outputs on device 1. With one split the devices
/// take turns; with more, both work:
///
///   device 0 | 0 | 1 | 2 |   |       a split per column; device 1 works on
///   device 1 |   | 0 | 1 | 2 |       one while device 0 works on the next
inline Tensor forward(Module& first, Module& second, const Tensor& inputs,
                      int splits, DeviceQueue& queue0, DeviceQueue& queue1,
                      double& bytes) {
  const std::int64_t rows = inputs.size(0) / splits;
  const auto n = static_cast<std::size_t>(splits);
  Tensors moved(n), outputs(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto begin = static_cast<std::int64_t>(i) * rows;
    // The host hands out work and does not wait for it
    queue0.enqueue([&, i, begin] {
      const Tensor x = first(slice(inputs, 0, begin, begin + rows));
      // A differentiable copy: its gradient goes back the same way
      moved[i] = to_device(x, queue1.device());
      bytes += 2 * static_cast<double>(x.bytes());
    });
    QueueEvent copied;
    copied.record(queue0);
    copied.wait(queue1);
    queue1.enqueue([&, i] { outputs[i] = second(moved[i]); });
  }
  Tensor all;
  queue1.enqueue([&] { all = concat(outputs, 0); });
  synchronize({&queue0, &queue1});
  return all;
}
// --- end

inline lesson::Result train(int splits) {
  // 1. Half of the layers on each device
  const Device device0 = RankContext::current().device,
               device1 = Device::cpu(1);
  DeviceQueue queue0(device0), queue1(device1);
  const auto layers = layers_of(lesson::config(lesson::mlp()));
  const int cut = layers->size() / 2;
  InitOptions init0 = lesson::init(), init1 = lesson::init();
  init0.device = device0, init1.device = device1;
  Stage first(*layers, 0, cut, init0),
      second(*layers, cut, layers->size(), init1);
  // 2. An optimizer for each, where its parameters are
  const auto optimizer0 = lesson::sgd(first.parameters());
  const auto optimizer1 = lesson::sgd(second.parameters());
  lesson::Result result;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 3. The labels must be where the outputs are
    const Batch batch = lesson::batch(step);
    const Tensor outputs = forward(first, second, batch.inputs, splits, queue0,
                                   queue1, result.bytes);
    const Tensor labels = to_device(batch.targets, device1);
    result.bytes += static_cast<double>(labels.bytes());
    // 4. One graph over both devices
    const Tensor loss = language_loss(outputs, labels);
    loss.backward();
    queue0.enqueue([&] { optimizer0->step(); });
    queue1.enqueue([&] { optimizer1->step(); });
    synchronize({&queue0, &queue1});
    first.clear_grad(), second.clear_grad();
    result.loss = loss.item();
  }
  result.peak_bytes = static_cast<double>(device0.memory().peak_total);
  result.weights = first.named_parameters();
  for (const auto& each : second.named_parameters()) {
    result.weights.push_back(each);
  }
  return result;
}

/// Ten steps send the activations between the halves and their gradients, and
/// the labels, whatever the number of splits.
inline double bill(int /*rank*/, int /*ranks*/) {
  const double tokens = lesson::num_tokens();
  const double width = 4.0 * lesson::config(lesson::mlp()).n_embd;
  return lesson::kSteps * tokens * (2 * width + 1) * 8;
}

inline lesson::Lesson this_lesson(int splits = 3) {
  return {/*ranks=*/{1}, [=](ProcessGroup&) { return train(splits); }, bill,
          lesson::mlp_on_one_device};
}

}  // namespace shardbook::model_parallel

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::model_parallel::this_lesson()); }
#endif
