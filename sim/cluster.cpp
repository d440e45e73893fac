// Reading clusters, and whether their parts fit together. The keys of the files
// are in internal/cluster_reader.cpp.

#include "sim/cluster.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "core/check.h"
#include "sim/internal/sources.h"

namespace shardbook::sim {

using internal::kMaxDevices;
using internal::Source;

namespace {

constexpr const char* kThisMachine = "this-machine";

void check_device(const DeviceSpec& device, const std::string& where) {
  SB_CHECK(!device.peak_flops.empty(), where,
           "/peak_TFLOPS: missing; give the peak per type, such as {\"f32\": "
           "19.5}");
  SB_CHECK(device.memory_bytes_per_s > 0, where,
           "/bandwidth_GB_per_s: missing; give the bandwidth of the memory");
  SB_CHECK(device.memory_bytes > 0, where,
           "/capacity_GB: missing; give the size of the memory");
}

/// Every device must reach every other one over links of the mesh.
void check_mesh(const Cluster& cluster, const std::string& label) {
  const std::string where = label + ": /intra_node/links: ";
  std::vector<int> island(static_cast<std::size_t>(cluster.devices_per_node));
  std::iota(island.begin(), island.end(), 0);
  for (const MeshLink& link : cluster.mesh) {
    const int highest = std::max(link.a, link.b);
    SB_CHECK(highest < cluster.devices_per_node, where, "device ", highest,
             " does not exist; there are ", cluster.devices_per_node,
             " per node, numbered from 0");
    const int from = island[static_cast<std::size_t>(link.a)];
    const int to = island[static_cast<std::size_t>(link.b)];
    std::replace(island.begin(), island.end(), from, to);
  }
  for (std::size_t i = 1; i < island.size(); ++i) {
    SB_CHECK(island[i] == island[0], where,
             "a link is missing: no way leads from device 0 to device ", i);
  }
}

void check_cluster(const Cluster& cluster, const std::string& label) {
  check_device(cluster.device, label + ": /device");
  check_device(cluster.host, label + ": /host");
  SB_CHECK(
      static_cast<std::int64_t>(cluster.num_nodes) * cluster.devices_per_node <=
          kMaxDevices,
      label, ": /nodes: ", cluster.num_nodes, " nodes of ",
      cluster.devices_per_node, " devices are more than ", kMaxDevices);
  SB_CHECK(cluster.devices_per_node == 1 || cluster.intra_node.bytes_per_s > 0,
           label, ": /intra_node/bandwidth_GB_per_s: missing; ",
           cluster.devices_per_node, " devices per node need a link");
  SB_CHECK(cluster.num_nodes == 1 || cluster.network.bytes_per_s > 0, label,
           ": /network/bandwidth_GB_per_s: missing; ", cluster.num_nodes,
           " nodes need a network");
  SB_CHECK(cluster.host_link.bytes_per_s > 0, label,
           ": /host_link/bandwidth_GB_per_s: missing; give the bandwidth "
           "between a device and its host");
  if (!cluster.mesh.empty()) check_mesh(cluster, label);
  for (std::size_t i = 0; i < cluster.faults.size(); ++i) {
    SB_CHECK(cluster.faults[i].rank < cluster.num_devices(), label,
             ": /faults/", i, "/rank: ", cluster.faults[i].rank,
             " is not a rank of this cluster; give 0 to ",
             cluster.num_devices() - 1);
  }
}

/// `software`: in place of the cluster's own; empty: that.
Cluster read_source(const Source& source, bool files_allowed,
                    const std::string& software = "") {
  Cluster cluster;
  cluster.network.name = "network";
  cluster.host_link.name = "pcie";
  internal::Chain chain(files_allowed);
  internal::read_cluster(source, chain, cluster);
  if (!software.empty()) {
    cluster.software = Software();
    internal::read_software(
        internal::find_source("software", software, "", "software "), chain,
        cluster.software);
    cluster.name += "+" + software;
  }
  internal::apply_software(cluster);
  check_cluster(cluster, source.label);
  return cluster;
}

}  // namespace

const char* trust_name(Trust trust) {
  return trust == Trust::kCalibrated     ? "calibrated"
         : trust == Trust::kInterpolated ? "interpolated"
                                         : "extrapolated";
}

Cluster Cluster::read(const std::string& name_or_file) {
  std::string name = name_or_file, software;
  std::error_code error;
  const std::size_t plus = name.rfind('+');
  if (plus != std::string::npos && !std::filesystem::exists(name, error)) {
    software = name.substr(plus + 1);
    name.resize(plus);
  }
  if (name != kThisMachine) {
    return read_source(internal::find_source("clusters", name, "", "cluster "),
                       true, software);
  }
  const std::string file = this_machine_file();
  SB_CHECK(std::filesystem::exists(file, error), "cluster this-machine: ", file,
           " does not exist; `./shardbook bench this-machine` measures this "
           "machine and writes it");
  return read_source({internal::read_file(file), file,
                      std::filesystem::path(file).parent_path().string()},
                     true, software);
}

Cluster Cluster::from_json(const std::string& text, const std::string& label) {
  return read_source({text, label, ""}, false);
}

std::string Cluster::this_machine_file() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::filesystem::path folder;
  if (cache != nullptr && cache[0] == '/') {
    folder = cache;
  } else {
    folder = std::filesystem::path(home != nullptr ? home : "/") / ".cache";
  }
  return (folder / "shardbook" / "this-machine.json").string();
}

}  // namespace shardbook::sim
