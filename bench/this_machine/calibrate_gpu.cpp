#include "bench/this_machine/calibrate_gpu.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/timing.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/stream.h"

namespace shardbook::this_machine {
namespace {

using nlohmann::ordered_json;

/// The GPU's median seconds for one call, in rounds of `count`.
double seconds_of(const std::function<void()>& body, int count) {
  bench::gpu_seconds(body, count);  // warms up
  std::vector<double> seconds;
  for (int round = 0; round < 7; ++round) {
    seconds.push_back(bench::gpu_seconds(body, count));
  }
  return bench::median(seconds);
}

double product_rate(std::int64_t mn, std::int64_t k, DType dtype) {
  const Tensor a = Tensor::empty({mn, k}, {dtype});
  const Tensor b = Tensor::empty({k, mn}, {dtype});
  fill_normal(a, 0, 1, 0, 1);
  fill_normal(b, 0, 2, 0, 1);
  const double flops = 2.0 * static_cast<double>(mn * mn * k);
  return flops / seconds_of([&] { (void)matmul(a, b); }, 5);
}

/// Seconds to copy so many bytes between two devices.
double copy_seconds(std::int64_t bytes, const Device& from, const Device& to) {
  const Tensor a = Tensor::zeros({bytes / 4}, {DType::kF32, from});
  const Tensor b = Tensor::zeros({bytes / 4}, {DType::kF32, to});
  return seconds_of([&] { b.copy_from(a); }, 10);
}

/// The host's time to issue an operation, and the GPU's to run it.
void measure_launches(GpuCalibration& gpu) {
  constexpr int kCount = 200;
  const Tensor x = Tensor::zeros({32});
  const Tensor large = Tensor::zeros({4096, 4096});
  const NoGrad no_grad;
  for (int i = 0; i < kCount; ++i) (void)add(x, x);  // warms up
  // Behind long work, the host is ahead: the GPU never waits for it
  Event begin, end;
  for (int i = 0; i < 20; ++i) (void)matmul(large, large);
  begin.record();
  const double issue_s = bench::now_s();
  for (int i = 0; i < kCount; ++i) (void)add(x, x);
  gpu.launch_s = (bench::now_s() - issue_s) / kCount;
  end.record();
  end.synchronize();
  gpu.kernel_s = end.elapsed_s(begin) / kCount;
}

}  // namespace

double half_k_of(double short_k, double short_rate, double long_k,
                 double long_rate) {
  // short_rate (short_k + h) / short_k = long_rate (long_k + h) / long_k
  const double slope = short_rate / short_k - long_rate / long_k;
  if (slope <= 0) return 0;
  return std::max(0.0, (long_rate - short_rate) / slope);
}

GpuCalibration measure_gpu() {
  RankContext context(Device::cuda(0));
  const RankContext::Scope scope(context);
  const Gpu found = gpu(0);
  GpuCalibration result;
  result.name = found.name;
  result.memory_bytes = found.memory_bytes;
  result.multiprocessors = found.multiprocessors;
  result.major = found.major;
  constexpr std::int64_t kSize = 8192, kShort = 512;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    result.products[dtype_name(dtype)] = product_rate(kSize, kSize, dtype);
  }
  result.products["f64"] = product_rate(kSize / 8, kSize / 8, DType::kF64);
  result.half_k = half_k_of(kShort, product_rate(kSize, kShort, DType::kBF16),
                            kSize, result.products["bf16"]);
  constexpr std::int64_t kBytes = std::int64_t{1} << 28;
  result.bytes_per_s =
      2.0 * kBytes / copy_seconds(kBytes, context.device, context.device);
  const double many = copy_seconds(kBytes, context.host(), context.device);
  result.host_latency_s = copy_seconds(4096, context.host(), context.device);
  result.host_bytes_per_s = kBytes / many;
  measure_launches(result);
  return result;
}

std::string cluster_json(const GpuCalibration& gpu, int num_gpus) {
  // Copy tiles, alignment and attention from the nearest generation
  const std::string nearest = gpu.major >= 9   ? "h100-80gb"
                              : gpu.major == 8 ? "a100-80gb"
                                               : "t4";
  ordered_json peaks;
  // The model's rate at k = 8192 is then the measured one
  for (const auto& [dtype, rate] : gpu.products) {
    peaks[dtype] = rate * (8192 + gpu.half_k) / 8192 / 1e12;
  }
  const ordered_json device = {
      {"extends", nearest},
      {"name", gpu.name},
      {"peak_TFLOPS", peaks},
      {"matmul_efficiency", 1},
      {"half_k", gpu.half_k},
      {"sustained", 1},
      {"units", gpu.multiprocessors},
      {"bandwidth_GB_per_s", gpu.bytes_per_s / 1e9},
      {"memory_efficiency", 1},
      {"capacity_GB", static_cast<double>(gpu.memory_bytes) / 1e9},
      {"launch_us", gpu.launch_s * 1e6},
      {"kernel_us", gpu.kernel_s * 1e6},
      {"trust", "interpolated"}};
  const ordered_json host_link = {
      {"bandwidth_GB_per_s", gpu.host_bytes_per_s / 1e9},
      {"latency_us", gpu.host_latency_s * 1e6},
      {"trust", "calibrated"}};
  // GPUs of one host meet over its memory where they have no faster link; that
  // link was not measured.
  ordered_json between = host_link;
  between["trust"] = "extrapolated";
  ordered_json inside = between;
  inside["kind"] = "pcie";
  const ordered_json cluster = {
      {"name", "this-machine"},       {"nodes", 1},
      {"devices_per_node", num_gpus}, {"device", device},
      {"intra_node", inside},         {"network", between},
      {"host", "dgx-a100-host"},      {"host_link", host_link}};
  return cluster.dump(1) + "\n";
}

}  // namespace shardbook::this_machine
