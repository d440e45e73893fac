#include "chapters/04_model_parallel/model_parallel.h"

#include <algorithm>

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::model_parallel {

std::vector<RowRange> fixed_splits(std::int64_t rows, std::int64_t split_size) {
  SB_CHECK(rows >= 0 && split_size >= 1, "fixed_splits: ", rows,
           " rows in pieces of ", split_size, "; give pieces of at least 1");
  if (rows == 0) return {{0, 0}};
  std::vector<RowRange> splits;
  for (std::int64_t begin = 0; begin < rows; begin += split_size) {
    splits.emplace_back(begin, std::min(rows, begin + split_size));
  }
  return splits;
}

int half_of(const ModelConfig& config) {
  if (!config.is_image()) return layers_of(config)->size() / 2;
  std::int64_t layers = 1;  // the stem
  for (std::size_t i = 0; i < config.depths.size() / 2; ++i) {
    layers += config.depths[i];
  }
  return static_cast<int>(layers);
}

double ideal_forward_share(std::int64_t num_splits) {
  SB_CHECK(num_splits >= 1, "ideal_forward_share: ", num_splits,
           " splits; give at least 1");
  const auto n = static_cast<double>(num_splits);
  return (n + 1) / (2 * n);
}

// --- Two devices -------------------------------------------------------------

ModelParallel::ModelParallel(const LayerList& layers, int cut,
                             const std::vector<Device>& devices,
                             const InitOptions& init, int num_threads)
    : ledger_(std::make_shared<CopyLedger>()) {
  SB_CHECK(devices.size() == 2 && devices[0] != devices[1],
           "model parallel: ", devices.size(),
           " devices were given; give two different ones");
  SB_CHECK(cut >= 1 && cut < layers.size(), "model parallel: a cut after ", cut,
           " of ", layers.size(), " layers; each device has at least one");
  for (const auto& [name, where] : shared_parameters(layers)) {
    SB_CHECK(
        where.front() >= cut || where.back() < cut, "model parallel: '", name,
        "' is used on both sides of the cut; a parameter lies on one device");
  }
  for (int i = 0; i < 2; ++i) {
    InitOptions here = init;
    here.device = devices[index(i)];
    halves_[index(i)] = std::make_unique<Stage>(
        layers, i == 0 ? 0 : cut, i == 0 ? cut : layers.size(), here);
    queues_[index(i)] =
        std::make_unique<DeviceQueue>(devices[index(i)], num_threads);
  }
}

std::vector<NamedTensor> ModelParallel::named_parameters() {
  std::vector<NamedTensor> all = half(0).named_parameters();
  for (NamedTensor& each : half(1).named_parameters()) {
    all.push_back(std::move(each));
  }
  return all;
}

ModelParallel::Later ModelParallel::run(int device, const Later& x) {
  const Later y = now({});
  queue(device).enqueue([this, device, x, y] {
    const Tensor input = std::move(*x);
    *y = half(device)(input);
  });
  return y;
}

ModelParallel::Later ModelParallel::move(const Later& x) {
  const Later y = now({});
  // The copy waits for both queues
  QueueEvent ready, copied;
  ready.record(queue(1));
  ready.wait(queue(0));
  queue(0).enqueue([this, x, y] {
    const Tensor sent = std::move(*x);
    *y = cross(sent, device(1), ledger_);
  });
  copied.record(queue(0));
  copied.wait(queue(1));
  return y;
}

Tensor ModelParallel::join(const std::vector<Later>& parts) {
  const Later whole = now({});
  queue(1).enqueue([&parts, whole] {
    Tensors outputs;
    for (const Later& part : parts) outputs.push_back(std::move(*part));
    *whole = outputs.size() == 1 ? outputs[0] : concat(outputs, 0);
  });
  synchronize({&queue(1), &queue(0)});
  return *whole;
}

Tensor ModelParallel::operator()(const Tensor& x) {
  return join({run(1, move(run(0, now(x))))});
}

PipelineParallel::PipelineParallel(const LayerList& layers, int cut,
                                   const std::vector<Device>& devices,
                                   const InitOptions& init,
                                   std::int64_t split_size, int num_threads)
    : ModelParallel(layers, cut, devices, init, num_threads),
      split_size_(split_size) {
  SB_CHECK(split_size >= 1, "pipeline parallel: splits of ", split_size,
           " rows; give at least 1");
}

Tensor PipelineParallel::operator()(const Tensor& x) {
  std::vector<Later> splits;
  for (const auto& [begin, end] : fixed_splits(x.size(0), split_size_)) {
    splits.push_back(now(slice(x, 0, begin, end)));
  }
  std::vector<Later> outputs;

  // Fill: the first split passes device 0 alone
  Later previous = move(run(0, splits[0]));
  for (std::size_t i = 1; i < splits.size(); ++i) {
    // Device 1 works on split i - 1, device 0 on split i
    outputs.push_back(run(1, previous));
    previous = move(run(0, splits[i]));
  }
  // Drain: the last split passes device 1 alone
  outputs.push_back(run(1, previous));
  return join(outputs);
}

Tensor forward_in_splits(Module& model, const Tensor& x,
                         std::int64_t split_size) {
  if (split_size == 0 || split_size >= x.size(0)) return model(x);
  Tensors outputs;
  for (const auto& [begin, end] : fixed_splits(x.size(0), split_size)) {
    outputs.push_back(model(slice(x, 0, begin, end)));
  }
  return concat(outputs, 0);
}

}  // namespace shardbook::model_parallel
