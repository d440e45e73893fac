// Operations. Messages are in message_cost.cpp.

#include "sim/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace shardbook::sim {

namespace {

/// Libraries have smaller tiles, too: each halving of the tile costs this much
/// of the speed, as operands are reused less often. cuBLAS's tiles from
/// 256 x 128 to 64 x 64 (NVIDIA, Matrix Multiplication Background User's
/// Guide, figure 4).
constexpr double kPerHalving = 0.9;
constexpr int kMaxHalvings = 3;
/// Few tiles and a long k: parts of k are summed side by side, then added.
constexpr int kMaxSplits = 8;
constexpr double kMinSplitK = 256;
/// Times of smaller products than this are interpolated at best.
constexpr double kCalibratedFlops = 1e9;

struct Peak {
  double flops_per_s = 0;
  bool known = false;
};

/// A type that the device has no units for runs on the next wider ones; one
/// that is wider than all runs on the slowest.
Peak peak_of(const DeviceSpec& device, DType dtype) {
  const auto found = device.peak_flops.find(dtype);
  if (found != device.peak_flops.end()) return {found->second, true};
  const auto f32 = device.peak_flops.find(DType::kF32);
  if (dtype_bytes(dtype) <= 4 && f32 != device.peak_flops.end()) {
    return {f32->second, true};
  }
  double slowest = 0;
  for (const auto& [type, peak] : device.peak_flops) {
    slowest = slowest == 0 ? peak : std::min(slowest, peak);
  }
  return {slowest, false};
}

double memory_seconds(const DeviceSpec& device, double bytes) {
  // bytes / (bandwidth * efficiency * bytes / (bytes + half)).
  return bytes <= 0
             ? 0
             : (bytes + device.half_memory_bytes) /
                   (device.memory_bytes_per_s * device.memory_efficiency);
}

bool aligned(const DeviceSpec& device, DType dtype, const ProductShape& shape) {
  if (dtype_bytes(dtype) > 2) return true;  // not on matrix units
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  return shape.n * bytes % device.alignment_bytes == 0 &&
         shape.k * bytes % device.alignment_bytes == 0;
}

/// Seconds of a product without its memory traffic: the best tile and split.
double product_seconds(const DeviceSpec& device, DType dtype,
                       const ProductShape& shape) {
  const double peak =
      peak_of(device, dtype).flops_per_s * device.sustained *
      device.max_matmul_efficiency *
      (aligned(device, dtype, shape) ? 1 : device.misaligned_efficiency) *
      (shape.batch > 1 ? device.grouped_efficiency : 1);
  const auto m = static_cast<double>(shape.m);
  const auto n = static_cast<double>(shape.n);
  const auto k = static_cast<double>(shape.k);
  const auto batch =
      static_cast<double>(std::max<std::int64_t>(shape.batch, 1));
  double best = 0;
  double tile_m = device.tile_m, tile_n = device.tile_n, share = 1;
  for (int halvings = 0; halvings <= kMaxHalvings; ++halvings) {
    for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
      const double part = k / splits;
      if (splits > 1 && part < kMinSplitK) break;
      const double tiles =
          batch * splits * std::ceil(m / tile_m) * std::ceil(n / tile_n);
      const double rounds = std::ceil(tiles / device.num_units);
      double seconds = rounds * device.num_units * tile_m * tile_n * 2 *
                       (part + device.half_k) / (peak * share);
      if (splits > 1) {
        // The parts are written and read in f32.
        seconds += memory_seconds(device, 4 * batch * m * n * (splits + 1));
      }
      if (best == 0 || seconds < best) best = seconds;
    }
    (tile_n >= tile_m ? tile_n : tile_m) /= 2;
    share *= kPerHalving;
  }
  return best;
}

/// Time of a product, or of the traffic of its operands where that is longer.
double bounded_product_seconds(const DeviceSpec& device, DType dtype,
                               const ProductShape& shape) {
  const double elements =
      static_cast<double>(shape.m) * static_cast<double>(shape.k) +
      static_cast<double>(shape.k) * static_cast<double>(shape.n) +
      static_cast<double>(shape.m) * static_cast<double>(shape.n);
  return std::max(
      product_seconds(device, dtype, shape),
      memory_seconds(device, elements * static_cast<double>(shape.batch) *
                                 static_cast<double>(dtype_bytes(dtype))));
}

/// Scores in memory: products of full matrices, with passes over the scores
/// between them.
double unfused_attention_seconds(const DeviceSpec& device,
                                 const OpEvent& event) {
  const ProductShape& scores = event.product;
  const ProductShape values = {scores.m, scores.k, scores.n, scores.batch};
  const double pairs = static_cast<double>(scores.m) *
                       static_cast<double>(scores.n) *
                       static_cast<double>(scores.batch);
  // The event counts, for each pair of query and key that is not masked, two
  // products forward and five backward, of which one recomputes the scores.
  // A causal mask leaves half of the pairs.
  const double products =
      event.flops / (2 * pairs * static_cast<double>(scores.k));
  const bool backward = products > 2.25;
  // Softmax with scale and mask reads half of the scores and writes all of
  // them; dropout reads and writes them, and writes its mask of single bytes.
  // Backward: dropout reads two and writes one; softmax reads two halves and
  // writes one.
  const double passes = backward ? 4.5 : 4;
  // The product that makes scores (backward: their gradient) has a short k, and
  // is as fast as its results can be written; the others have a long one.
  const double making = memory_seconds(
      device, pairs * static_cast<double>(dtype_bytes(event.dtype)));
  return making +
         (backward ? 3 : 1) *
             bounded_product_seconds(device, event.dtype, values) +
         memory_seconds(
             device,
             passes * pairs * static_cast<double>(dtype_bytes(event.dtype)));
}

/// How many times the bytes of one pass PyTorch moves without torch.compile, for
/// 16-bit elements. Forward, per element: RMSNorm converts (2 + 4), squares (8),
/// sums (4), multiplies (8), converts (6) and multiplies by its weight (4), 34 in
/// place of 4; rotary positions convert (6), multiply as complex numbers (8) and
/// convert (6), 20 in place of 4; a gate is SiLU (4) and a product (6), 10 in place
/// of 6. Backward, each operation has one or two of its own: 68 in place of 6, 20
/// in place of 4, and 16 in place of 10.
double passes_in_f32(const OpEvent& event) {
  const bool is_backward = event.phase == Phase::kBackward;
  if (std::strcmp(event.name, "rms_norm") == 0) {
    return is_backward ? 68.0 / 6 : 34.0 / 4;
  }
  if (std::strcmp(event.name, "rope") == 0) return 5;
  if (std::strcmp(event.name, "swiglu") == 0)
    return is_backward ? 1.6 : 10.0 / 6;
  return 1;
}

/// Bytes that an operation moves; more where the cluster's software computes it
/// in f32, one element-wise operation after another.
double traffic(const Cluster& cluster, const OpEvent& event) {
  // Megatron-LM's cross-entropy of 16-bit logits (core/tensor_parallel/
  // cross_entropy.py). Bytes of each logit, forward: conversion (2 + 4), maximum
  // (4), difference (8), exponential (8), sum (4), quotient (8); backward: copy
  // (8), product (8), conversion (6). An event counts 5 operations per logit
  // forward and 3 backward.
  if (!cluster.software.fused_loss &&
      std::strcmp(event.name, "cross_entropy") == 0) {
    return event.flops *
           (event.phase == Phase::kBackward ? 22.0 / 3 : 38.0 / 5);
  }
  // out -= sigmoid(..) (out - block), of zhuzilin/ring-flash-attention. Bytes of
  // each element: conversion of the block (2 + 4), difference (12), product (8),
  // difference (12). An event counts 3 operations per element.
  if (!cluster.software.fused_merge &&
      std::strcmp(event.name, "merge_attention") == 0) {
    return event.flops * 38.0 / 3;
  }
  if (!cluster.software.fused_elementwise) {
    return event.bytes * passes_in_f32(event);
  }
  return event.bytes;
}

/// The device's measurement for this operation, for all products or for
/// everything else; null where there is none.
const MeasuredOperation* measured_operation(const DeviceSpec& device,
                                            const OpEvent& event) {
  if (device.operations.empty()) return nullptr;
  auto found = device.operations.find(std::string(event.name) + " " +
                                      phase_name(event.phase));
  if (found == device.operations.end()) {
    found = device.operations.find(event.product.m > 0 ? "product" : "other");
  }
  return found == device.operations.end() ? nullptr : &found->second;
}

/// One rank's share of the node's host.
DeviceSpec share_of_host(const Cluster& cluster) {
  DeviceSpec host = cluster.host;
  const double share = 1.0 / cluster.devices_per_node;
  for (auto& [dtype, peak] : host.peak_flops) peak *= share;
  host.memory_bytes_per_s *= share;
  host.num_units = std::max(1, static_cast<int>(host.num_units * share));
  return host;
}

}  // namespace

Cost CostModel::operation(const OpEvent& event, bool on_host) const {
  const DeviceSpec& device =
      on_host ? share_of_host(cluster_) : cluster_.device;
  if (const MeasuredOperation* measured = measured_operation(device, event)) {
    return {measured->fixed_s + event.flops * measured->s_per_flop +
                event.bytes * measured->s_per_byte,
            device.trust, "measured"};
  }
  const ProductShape& shape = event.product;
  const double memory = memory_seconds(device, traffic(cluster_, event));
  Cost cost = {memory, device.trust, "memory"};
  if (shape.m > 0 && shape.n > 0 && shape.k > 0) {
    const Peak peak = peak_of(device, event.dtype);
    double compute;
    if (std::strcmp(event.name, "attention") != 0) {
      compute = product_seconds(device, event.dtype, shape);
    } else if (cluster_.software.fused_attention) {
      compute = event.flops / (peak.flops_per_s * device.sustained *
                               device.max_attention_efficiency);
    } else {
      compute = unfused_attention_seconds(device, event);
    }
    if (compute > memory) cost = {compute, device.trust, "matrix units"};
    if (!peak.known) cost.trust = Trust::kExtrapolated;
    if (event.flops < kCalibratedFlops) {
      cost.trust = std::max(cost.trust, Trust::kInterpolated);
    }
  }
  if (cost.seconds < device.kernel_s) {
    cost = {device.kernel_s, std::max(cost.trust, Trust::kInterpolated),
            "kernel"};
  }
  return cost;
}

double CostModel::compute_slowdown(int rank) const {
  double slowdown = 1;
  for (const Fault& fault : cluster_.faults) {
    if (fault.rank == rank) slowdown *= fault.compute_slowdown;
  }
  return slowdown;
}

double CostModel::link_slowdown(const std::vector<int>& ranks) const {
  double slowdown = 1;
  for (const Fault& fault : cluster_.faults) {
    // A chain is as slow as its slowest member.
    if (std::find(ranks.begin(), ranks.end(), fault.rank) != ranks.end()) {
      slowdown = std::max(slowdown, fault.link_slowdown);
    }
  }
  return slowdown;
}

}  // namespace shardbook::sim
