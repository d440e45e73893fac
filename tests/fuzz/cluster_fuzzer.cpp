// Whatever the text of a cluster is, reading it ends in a cluster whose parts
// fit together or in an Error that names the file and can be read.

#include <cmath>

#include "core/check.h"
#include "sim/cluster.h"
#include "sim/internal/presets.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::check_message;
using shardbook::kFuzzedInput;
using shardbook::promise;
using shardbook::sim::Cluster;
using shardbook::sim::DeviceSpec;
using shardbook::sim::LinkSpec;

bool positive(double value) { return std::isfinite(value) && value > 0; }

void check_device(const DeviceSpec& device) {
  promise(!device.peak_flops.empty());
  for (const auto& [dtype, peak] : device.peak_flops) promise(positive(peak));
  promise(positive(device.memory_bytes_per_s) && device.memory_bytes > 0);
  promise(device.tile_m > 0 && device.tile_n > 0 && device.num_units > 0);
  promise(positive(device.sustained) && positive(device.memory_efficiency));
}

void check_link(const LinkSpec& link, bool needed) {
  promise(!needed || positive(link.speed()));
  promise(link.latency_s >= 0 && link.start_s >= 0);
}

void check_cluster(const Cluster& cluster) {
  promise(cluster.num_nodes > 0 && cluster.devices_per_node > 0);
  check_device(cluster.device);
  check_device(cluster.host);
  check_link(cluster.intra_node, cluster.devices_per_node > 1);
  check_link(cluster.network, cluster.num_nodes > 1);
  check_link(cluster.host_link, true);
  for (const auto& link : cluster.mesh) {
    promise(link.a >= 0 && link.a < cluster.devices_per_node && link.b >= 0 &&
            link.b < cluster.devices_per_node && link.count > 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  try {
    check_cluster(
        Cluster::from_json(shardbook::text_of(data, size), kFuzzedInput));
  } catch (const shardbook::Error& error) {
    // The label, or the preset that the text extends.
    const std::string message = error.what();
    const bool is_preset = message.rfind("preset ", 0) == 0;
    check_message(message, is_preset ? "preset " : kFuzzedInput);
  }
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  std::vector<std::string> seeds = {
      "",
      "{}",
      R"({"extends": "dgx-a100", "nodes": 2})",
      R"({"extends": "dgx-v100", "intra_node": {"kind": "mesh", "links":
          [[0, 1, 2], [1, 2, 1]]}, "devices_per_node": 3})",
      R"({"extends": "selene", "device": {"extends": "t4", "launch_us": 1},
          "jitter": {"amount": 0.5, "seed": 3},
          "faults": [{"rank": 1, "link_slowdown": 3}]})",
      R"({"extends": "dgx-a100", "intra_node": {"kind": "memory",
          "bandwidth_GB_per_s": 8, "latency_us": 20}, "device": {"operations":
          {"gelu forward": {"us": 1, "us_per_MB": 70},
           "linear forward": {"us": 2, "us_per_MFLOP": 10}}}})"};
  for (const auto& preset : sim::internal::presets()) {
    seeds.push_back(preset.text);
  }
  return seeds;
}
