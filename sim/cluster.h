#pragma once

// A cluster that is not there: devices, links and how they hang together.
//
//   Cluster cluster = Cluster::read("dgx-a100");      // a preset
//   Cluster cluster = Cluster::read("my-cluster.json");
//
// Units are in the names of the JSON keys, and values are SI: seconds, bytes
// per second, FLOP per second. `sim/clusters/*.json` are the presets, and the
// reference for the format.
//
//   {"name": "dgx-a100", "nodes": 128, "devices_per_node": 8,
//    "device": "a100-80gb",
//    "intra_node": {"kind": "switch", "latency_us": 3, "GB_per_s": 300},
//    "network": {"nics_per_node": 8, "latency_us": 5, "GB_per_s": 25},
//    "host": {...}}

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace shardbook::sim {

/// How far a prediction may be trusted.
enum class Trust {
  kCalibrated,   ///< fitted to measurements of this device and size
  kInterpolated, ///< between measured sizes, or from its data sheet
  kExtrapolated  ///< beyond what has been measured on any such device
};
const char* trust_name(Trust trust);

/// One type of device: data sheet and calibration.
struct DeviceSpec {
  std::string name;                  ///< "a100-80gb"
  std::map<DType, double> peak_flops;  ///< per second, dense
  double memory_bytes_per_s = 0;
  std::int64_t memory_bytes = 0;
  /// Host time to issue one operation.
  double launch_s = 0;
  /// Shortest time of one operation on the device.
  double kernel_s = 0;
  /// Matrix units: rows and columns of the tile of one product, and how many
  /// tiles run at once (the quantisation of products into waves).
  int tile_m = 128, tile_n = 128, num_units = 1;
  /// Share of the peak that the largest products reach.
  double max_matmul_efficiency = 1;
  /// Length of k at which a product reaches half of that.
  double half_k = 0;
  double max_attention_efficiency = 1;
  /// Share of the memory bandwidth that streaming operations reach.
  double memory_efficiency = 1;
  /// Memory traffic at which a streaming operation reaches half of that.
  double half_memory_bytes = 0;
  Trust trust = Trust::kInterpolated;
};

struct LinkSpec {
  std::string name;  ///< "nvlink", "network", "pcie"
  double latency_s = 0;
  double bytes_per_s = 0;  ///< each way
};

/// One direct connection between two devices of a node.
struct MeshLink {
  int a = 0, b = 0;
  int count = 1;  ///< parallel links, each as fast as the LinkSpec
};

/// Ranks that differ from the others.
struct Fault {
  int rank = 0;
  double compute_slowdown = 1;  ///< operations take so many times as long
  double link_slowdown = 1;     ///< so do messages that touch the rank
};

class Cluster {
 public:
  /// A preset's name or a FILE.json. Throws Error that names the file, the
  /// path in it ("/network/GB_per_s"), the value and what is allowed.
  static Cluster read(const std::string& name_or_file);
  static Cluster from_json(const std::string& text, const std::string& label);
  static std::vector<std::string> preset_names();

  int num_devices() const { return num_nodes * devices_per_node; }
  int node_of(int rank) const { return rank / devices_per_node; }

  std::string name;
  int num_nodes = 1;
  int devices_per_node = 1;
  DeviceSpec device;
  /// Within a node: a switch that gives each device `bytes_per_s` each way, or
  /// a mesh of links between pairs.
  LinkSpec intra_node;
  std::vector<MeshLink> mesh;  ///< empty: a switch
  /// Between nodes: `nics_per_node` of them, shared by the node's devices.
  LinkSpec network;
  int nics_per_node = 1;
  /// Between a device and its host.
  LinkSpec host_link;
  DeviceSpec host;  ///< the CPU of one node, shared by its devices
  /// Attention in one kernel (true), or scores in memory as older software.
  bool fused_attention = true;
  std::vector<Fault> faults;
  /// Each operation's time is multiplied by 1 + jitter * u, u in [0, 1) drawn
  /// from (seed, rank, number of the operation).
  double jitter = 0;
  std::uint64_t jitter_seed = 0;
};

}  // namespace shardbook::sim
