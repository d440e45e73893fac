#include "bench/this_machine/calibrate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/timing.h"
#include "chapters/00_single_device/single_device.h"
#include "comm/launch.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/stream.h"

namespace shardbook::this_machine {
namespace {

using bench::median;
using bench::now_s;
using nlohmann::ordered_json;

// One operation of a step, and its seconds in each step.
struct Slot {
  OpEvent event;
  std::vector<double> seconds;
};

// Sees the same operations in every step. What happens between two operations
// (autograd, memory) counts towards the second one.
class Recorder : public Observer {
 public:
  void begin_step() {
    next_ = 0;
    depth_ = 0;
    last_s_ = now_s();
  }
  void on_op_begin(const OpEvent&) override { ++depth_; }
  void on_op_end(const OpEvent& event) override {
    if (--depth_ > 0) return;
    const double now = now_s();
    if (next_ == slots_.size()) slots_.push_back({event, {}});
    slots_[next_++].seconds.push_back(now - last_s_);
    last_s_ = now_s();
  }
  const std::vector<Slot>& slots() const { return slots_; }

 private:
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  int depth_ = 0;
  double last_s_ = 0;
};

struct Size {
  std::string type;
  int hidden, heads, layers;
  std::int64_t batch, seq;
};

// Sizes near those of gpt-nano and mlp and of their micro-batches, but never
// equal. The depth is equal, since the tensors kept for backward push the rest
// out of the caches.
const std::vector<Size> kSizes = {
    {"gpt2", 48, 4, 4, 28, 48}, {"gpt2", 48, 4, 4, 14, 56},
    {"gpt2", 56, 4, 4, 24, 72}, {"gpt2", 72, 4, 4, 26, 60},
    {"gpt2", 72, 4, 4, 11, 72}, {"gpt2", 80, 4, 4, 22, 56},
    {"gpt2", 96, 4, 4, 10, 64}, {"gpt2", 56, 4, 4, 5, 72},
    {"gpt2", 72, 4, 4, 3, 56},  {"gpt2", 48, 4, 4, 2, 60},
    {"mlp", 48, 1, 3, 28, 48},  {"mlp", 80, 1, 3, 14, 72},
    {"mlp", 56, 1, 3, 4, 60}};

// Around ResNet-50 with images of 128 x 128, which the chapter on model
// parallelism trains, but never equal.
struct ImageSize {
  std::vector<int> depths;
  std::int64_t image, batch;
};
const std::vector<ImageSize> kImageSizes = {{{2, 1, 2, 1}, 96, 20},
                                            {{1, 2, 1, 2}, 160, 5},
                                            {{1, 1, 2, 1}, 112, 10},
                                            {{1, 1, 1, 1}, 144, 3}};

Options options_of(const ordered_json& model, std::int64_t batch) {
  Options options;
  options.model = model.dump();
  options.data = "random";
  options.batch = batch;
  return options;
}

std::vector<Slot> record_steps(const Options& options, int num_steps) {
  single_device::SingleDevice device(options, {});
  const auto recorder = std::make_shared<Recorder>();
  for (int step = 0; step < num_steps; ++step) {
    if (step == 2) RankContext::current().add_observer(recorder);
    recorder->begin_step();
    device.step(step);
  }
  RankContext::current().remove_observer(recorder);
  return recorder->slots();
}

ordered_json link_json(double gigabytes_per_s, double latency_s,
                       const char* trust) {
  return {{"bandwidth_GB_per_s", gigabytes_per_s},
          {"latency_us", latency_s * 1e6},
          {"trust", trust}};
}

std::string cluster_text(int devices, const ordered_json& device,
                         const ordered_json& inside,
                         const ordered_json& network, const ordered_json& host,
                         const ordered_json& host_link) {
  const ordered_json cluster = {{"name", "this-machine"},
                                {"nodes", 1},
                                {"devices_per_node", devices},
                                {"device", device},
                                {"intra_node", inside},
                                {"network", network},
                                {"host", host},
                                {"host_link", host_link}};
  return cluster.dump(1) + "\n";
}

}  // namespace

Fit fit(const std::vector<Sample>& samples, bool by_both) {
  const int columns = by_both ? 3 : 2;
  const double power = by_both ? 1 : 2;
  // In units near 1: ms, GFLOP, 10 MB.
  double a[3][4] = {};
  for (const Sample& sample : samples) {
    const double row[4] = {1e-3, sample.work * 1e-9, sample.bytes * 1e-7,
                           sample.seconds};
    const double weight = std::pow(sample.seconds, -power);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 4; ++j) a[i][j] += weight * row[i] * row[j];
    }
  }
  // The sum is convex: the best of one coordinate after the other ends at the
  // least
  double x[3] = {};
  for (int round = 0; round < 100000; ++round) {
    for (int i = 0; i < columns; ++i) {
      double rest = a[i][3];
      for (int j = 0; j < columns; ++j) rest -= a[i][j] * x[j];
      if (a[i][i] > 0) x[i] = std::max(0.0, x[i] + rest / a[i][i]);
    }
  }
  return {x[0] * 1e-3, x[1] * 1e-9, x[2] * 1e-7};
}

std::vector<OperationFit> measure_operations() {
  RankContext context(Device::cpu(0), 0, /*num_threads=*/1);
  const RankContext::Scope scope(context);
  using Key = std::pair<std::string, Phase>;
  std::map<Key, std::vector<Sample>> samples;
  std::map<Key, bool> by_flops;
  const auto add = [&](const std::vector<Slot>& slots,
                       const std::map<Key, bool>& known) {
    for (const Slot& slot : slots) {
      const Key key = {slot.event.name, slot.event.phase};
      if (known.count(key) > 0) continue;
      by_flops[key] = slot.event.product.m > 0;
      samples[key].push_back(
          {by_flops[key] ? slot.event.flops : slot.event.bytes,
           median(slot.seconds), slot.event.bytes});
    }
  };
  for (const Size& size : kSizes) {
    Options options = options_of({{"model_type", size.type},
                                  {"vocab_size", 256},
                                  {"n_positions", 256},
                                  {"n_embd", size.hidden},
                                  {"n_layer", size.layers},
                                  {"n_head", size.heads}},
                                 size.batch);
    options.seq = size.seq;
    add(record_steps(options, 25), {});
  }
  // Image models add the operations that language models do not have.
  const std::map<Key, bool> known = by_flops;
  for (const ImageSize& size : kImageSizes) {
    Options options = options_of({{"model_type", "resnet"},
                                  {"depths", size.depths},
                                  {"layer_type", "bottleneck"}},
                                 size.batch);
    options.optimizer = "sgd";
    options.image_size = size.image;
    options.seq = 1;
    add(record_steps(options, 7), known);
  }
  std::vector<OperationFit> fits;
  for (const auto& [key, list] : samples) {
    const bool by_both = key.first == "conv2d" || key.first == "conv2d_3x3";
    fits.push_back(
        {key.first, key.second, by_both || by_flops[key], fit(list, by_both)});
  }
  return fits;
}

Fit measure_all_reduce() {
  std::vector<Sample> samples;
  run_ranks(2, [&](ProcessGroup& world) {
    for (std::int64_t numel = 256; numel <= (1 << 20); numel *= 4) {
      const Tensor x = Tensor::zeros({numel});
      std::vector<double> seconds;
      for (int repeat = 0; repeat < 40; ++repeat) {
        world.barrier();
        seconds.push_back(
            bench::seconds_of([&] { world.all_reduce(x).wait(); }));
      }
      if (world.rank() == 0) {
        samples.push_back({static_cast<double>(x.bytes()), median(seconds)});
      }
    }
  });
  return fit(samples);
}

std::string cluster_json(const std::vector<OperationFit>& operations,
                         const Fit& all_reduce, int num_cores,
                         double memory_bytes) {
  ordered_json fitted = ordered_json::object();
  for (const OperationFit& operation : operations) {
    ordered_json& times =
        fitted[operation.name + " " + phase_name(operation.phase)];
    times = {{"us", operation.fit.fixed_s * 1e6},
             {operation.by_flops ? "us_per_MFLOP" : "us_per_MB",
              operation.fit.per_unit_s * 1e12}};
    if (operation.fit.per_byte_s > 0) {
      times["us_per_MB"] = operation.fit.per_byte_s * 1e12;
    }
  }
  const double bandwidth =
      all_reduce.per_unit_s > 0 ? 1 / all_reduce.per_unit_s / 1e9 : 1e3;
  const ordered_json link =
      link_json(bandwidth, all_reduce.fixed_s, "calibrated");
  ordered_json memory = link;
  memory["kind"] = "memory";
  // For operations that were not measured: the right order of magnitude.
  const ordered_json core = {{"name", "core"},
                             {"peak_TFLOPS", {{"f32", 0.1}, {"f64", 0.05}}},
                             {"bandwidth_GB_per_s", 10},
                             {"capacity_GB", memory_bytes / num_cores / 1e9},
                             {"trust", "extrapolated"}};
  ordered_json measured = core;
  measured["operations"] = fitted;
  measured["trust"] = "calibrated";
  return cluster_text(num_cores, measured, memory, link, core, link);
}

// --- A GPU -------------------------------------------------------------------

namespace {

/// The GPU's median seconds for one call, in rounds of `count`.
double gpu_median_of(const std::function<void()>& body, int count) {
  bench::gpu_seconds(body, count);  // warms up
  std::vector<double> seconds;
  for (int round = 0; round < 7; ++round) {
    seconds.push_back(bench::gpu_seconds(body, count));
  }
  return median(seconds);
}

double product_rate(std::int64_t mn, std::int64_t k, DType dtype) {
  const Tensor a = Tensor::empty({mn, k}, {dtype});
  const Tensor b = Tensor::empty({k, mn}, {dtype});
  fill_normal(a, 0, 1, 0, 1);
  fill_normal(b, 0, 2, 0, 1);
  const double flops = 2.0 * static_cast<double>(mn * mn * k);
  return flops / gpu_median_of([&] { (void)matmul(a, b); }, 5);
}

/// Seconds to copy so many bytes between two devices.
double copy_seconds(std::int64_t bytes, const Device& from, const Device& to) {
  const Tensor a = Tensor::zeros({bytes / 4}, {DType::kF32, from});
  const Tensor b = Tensor::zeros({bytes / 4}, {DType::kF32, to});
  return gpu_median_of([&] { b.copy_from(a); }, 10);
}

/// The host's time to issue the smallest operation, and the GPU's to run it.
struct Launch {
  double issue_s = 0, kernel_s = 0;
};
Launch measure_launches() {
  constexpr int kCount = 200;
  const Tensor x = Tensor::zeros({32});
  const Tensor large = Tensor::zeros({4096, 4096});
  const NoGrad no_grad;
  for (int i = 0; i < kCount; ++i) (void)add(x, x);  // warms up
  // Behind long work, the host is ahead: the GPU never waits for it
  Event begin, end;
  for (int i = 0; i < 20; ++i) (void)matmul(large, large);
  begin.record();
  const double issue_s = bench::seconds_of([&] {
    for (int i = 0; i < kCount; ++i) (void)add(x, x);
  });
  end.record();
  end.synchronize();
  return {issue_s / kCount, end.elapsed_s(begin) / kCount};
}

/// k at which a product has half of its speed, from the rates of the same
/// product with a short and a long k: rate(k) = R k / (k + half_k).
double half_k_of(double short_k, double short_rate, double long_k,
                 double long_rate) {
  // short_rate (short_k + h) / short_k = long_rate (long_k + h) / long_k
  const double slope = short_rate / short_k - long_rate / long_k;
  if (slope <= 0) return 0;
  return std::max(0.0, (long_rate - short_rate) / slope);
}

}  // namespace

std::string measured_gpus_json() {
  RankContext context(Device::cuda(0));
  const RankContext::Scope scope(context);
  const Gpu found = gpu(0);
  constexpr std::int64_t kSize = 8192, kShort = 512;
  std::map<std::string, double> rates = {
      {"f64", product_rate(kSize / 8, kSize / 8, DType::kF64)}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    rates[dtype_name(dtype)] = product_rate(kSize, kSize, dtype);
  }
  const double half_k = half_k_of(
      kShort, product_rate(kSize, kShort, DType::kBF16), kSize, rates["bf16"]);
  ordered_json peaks;
  // The model's rate at k = kSize is then the measured one
  for (const auto& [dtype, rate] : rates) {
    peaks[dtype] = rate * (kSize + half_k) / kSize / 1e12;
  }
  constexpr std::int64_t kBytes = std::int64_t{1} << 28;
  const Launch launch = measure_launches();
  const ordered_json device = {
      // Copy tiles, alignment and attention from the nearest generation
      {"extends", found.major >= 9   ? "h100-80gb"
                  : found.major == 8 ? "a100-80gb"
                                     : "t4"},
      {"name", found.name},
      {"peak_TFLOPS", peaks},
      {"matmul_efficiency", 1},
      {"half_k", half_k},
      {"sustained", 1},
      {"units", found.multiprocessors},
      {"bandwidth_GB_per_s",
       2e-9 * kBytes / copy_seconds(kBytes, context.device, context.device)},
      {"memory_efficiency", 1},
      {"capacity_GB", static_cast<double>(found.memory_bytes) / 1e9},
      {"launch_us", launch.issue_s * 1e6},
      {"kernel_us", launch.kernel_s * 1e6},
      {"trust", "interpolated"}};
  const double host_rate =
      1e-9 * kBytes / copy_seconds(kBytes, context.host(), context.device);
  const double host_latency_s =
      copy_seconds(4096, context.host(), context.device);
  const ordered_json host_link =
      link_json(host_rate, host_latency_s, "calibrated");
  // GPUs of one host meet over its memory where they have no faster link; that
  // link was not measured.
  const ordered_json between =
      link_json(host_rate, host_latency_s, "extrapolated");
  ordered_json inside = between;
  inside["kind"] = "pcie";
  return cluster_text(num_gpus(), device, inside, between, "dgx-a100-host",
                      host_link);
}

}  // namespace shardbook::this_machine
