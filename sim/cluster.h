#pragma once

// The description of a cluster: devices, links and how they are connected.
//
//   Cluster cluster = Cluster::read("dgx-a100");      // a preset
//   Cluster cluster = Cluster::read("my-cluster.json");
//
// Units are in the names of the JSON keys (GB is 1e9 bytes, Gb is 1e9 bits),
// and the fields below are SI: seconds, bytes per second, FLOP per second.
// `sim/clusters/*.json` are the presets, `sim/devices/*.json` the devices,
// `sim/software/*.json` what trains on them; they are the reference for the format. A key that begins with an underscore is a
// remark, and remarks there give the source of the constants.
//
//   {"extends": "dgx-a100", "name": "two nodes, one NIC each", "nodes": 2,
//    "network": {"nics_per_node": 1, "bandwidth_Gb_per_s": 100}}
//
// A file may extend a preset or another file (relative to itself), and its
// "device", "host" and "software" may be names or objects, which may extend others:
// keys that a file leaves out keep their values.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace shardbook::sim {

/// How far a prediction may be trusted.
enum class Trust {
  kCalibrated,    ///< fitted to measurements of this device and size
  kInterpolated,  ///< between measured sizes, or from its data sheet
  kExtrapolated   ///< beyond what has been measured on any such device
};
/// "calibrated", "interpolated", "extrapolated".
const char* trust_name(Trust trust);

/// The measured time of one operation: fixed_s + flops * s_per_flop + bytes *
/// s_per_byte.
struct MeasuredOperation {
  double fixed_s = 0;
  double s_per_flop = 0;
  double s_per_byte = 0;
};

/// One type of device: data sheet and calibration.
struct DeviceSpec {
  std::string name;                    ///< "a100-80gb"
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
  /// Matrix units need n and k in multiples of `alignment_bytes`; other
  /// products run at this share of the speed.
  int alignment_bytes = 16;
  double misaligned_efficiency = 1;
  /// Share of that speed that many products of one shape at once reach, such as
  /// the products of experts.
  double grouped_efficiency = 1;
  /// Share of the peak that attention in one kernel reaches.
  double max_attention_efficiency = 1;
  /// Share of the memory bandwidth that streaming operations reach.
  double memory_efficiency = 1;
  /// Memory traffic at which a streaming operation reaches half of that.
  double half_memory_bytes = 0;
  /// Share of the speed of products and attention that hours of training
  /// sustain: the power limit does not allow the clocks of short benchmarks.
  double sustained = 1;
  /// Speed of FP8 products, scaling included, over 16-bit ones; 0: no FP8.
  double fp8_speedup = 0;
  /// Measured times that replace the constants above: of one operation ("gelu
  /// forward"), of all products ("product") or of all others ("other").
  std::map<std::string, MeasuredOperation> operations;
  Trust trust = Trust::kInterpolated;
};

struct LinkSpec {
  std::string name;  ///< "nvlink", "network", "pcie", "memory", "flat"
  /// Latency of one step of a collective, or of a message, between devices.
  double latency_s = 0;
  double bytes_per_s = 0;  ///< each way, by the data sheet
  /// Share of bytes_per_s that large messages reach.
  double efficiency = 1;
  /// Time before the first byte of a collective: launch, meeting the peers.
  double start_s = 0;
  /// The same for NCCL's protocol LL128, and its share of `speed()`. 0: not
  /// measured; typical figures are used, and each collective gets the fastest
  /// protocol instead of NCCL's choice.
  double ll128_start_s = 0;
  double ll128_share = 0.7;
  /// The bandwidth that NCCL expects of this link when it chooses a protocol;
  /// 0: `speed()`.
  double nccl_bytes_per_s = 0;
  /// In a ring, each piece ends in a step that only receives. This is the part
  /// of its cost, in steps, that does not hide behind the pieces before and
  /// after.
  double last_step = 0;
  /// Bytes per second into each device or NIC when the switch sums (NVLink
  /// SHARP, InfiniBand SHARP); 0: it does not sum.
  double reduction_bytes_per_s = 0;
  /// Ranks in the largest group that the constants were fitted to.
  int measured_ranks = 0;
  Trust trust = Trust::kInterpolated;

  double speed() const { return bytes_per_s * efficiency; }
  double expected() const {
    return nccl_bytes_per_s > 0 ? nccl_bytes_per_s : speed();
  }
};

/// One direct connection between two devices of a node.
struct MeshLink {
  int a = 0, b = 0;
  int count = 1;  ///< parallel links, each as fast as the LinkSpec
};

/// The software that trains on a cluster: which operations it fuses, what its host
/// costs, and how it runs a step where neither a job nor a plan says so.
struct Software {
  std::string name;  ///< "megatron-lm-2022"; empty: as the chapters do it
  /// True: attention in one kernel; false: scores in memory (older software).
  bool fused_attention = true;
  /// Cross-entropy in one pass each way, or element by element in f32.
  bool fused_loss = true;
  /// The same for the sums of ring attention.
  bool fused_merge = true;
  /// Host time for each member of an all-gather or reduce-scatter, where the
  /// software keeps one tensor per member and copies them one by one; 0 where
  /// it hands over one tensor.
  double member_s = 0;
  /// Norms, rotary positions and gates in one pass each way, or operation by
  /// operation in f32 (PyTorch without torch.compile).
  bool fused_elementwise = true;
  /// What it reaches on a type of device: the device's name and, as JSON, keys of a
  /// device. In the order in which they apply.
  std::vector<std::pair<std::string, std::string>> on_device;
  /// Of a step over a mesh: see the fields of the same names in HybridJob and
  /// StageLayout (chapters/planner).
  bool is_synchronous = false, overlaps_gradients = false;
  bool overlaps_tensor = false, scatters_messages = false;
  bool sends_once_per_node = false, scales_by_maximum = false;
  bool waits_for_messages = false;
  bool sums_in_f32 = false;  ///< gradients of 16-bit parameters
  /// ZeRO-3 fetches each module's parameters when it needs them, beside nothing
  /// else.
  bool fetches_modules = false;
};

/// Ranks that differ from the others.
struct Fault {
  int rank = 0;
  double compute_slowdown = 1;  ///< factor on the time of operations
  double link_slowdown = 1;     ///< and of messages from or to the rank
};

class Cluster {
 public:
  /// A preset's name or a FILE.json, and what trains there in place of the
  /// cluster's own software: "selene+megatron-lm-2022". Throws Error that names
  /// the file, the path in it ("/network/GB_per_s"), the value and what is
  /// allowed.
  static Cluster read(const std::string& name_or_file);
  /// Messages call the file `label`; `extends` may name presets only.
  static Cluster from_json(const std::string& text, const std::string& label);
  /// The file of "this-machine": shardbook/this-machine.json in $XDG_CACHE_HOME
  /// or ~/.cache.
  static std::string this_machine_file();

  int num_devices() const { return num_nodes * devices_per_node; }
  int node_of(int rank) const { return rank / devices_per_node; }

  std::string name;
  int num_nodes = 1;
  int devices_per_node = 1;
  DeviceSpec device;
  /// Within a node: a switch that gives each device `bytes_per_s` each way, or
  /// a mesh of links between pairs.
  LinkSpec intra_node;
  /// The devices are cores that exchange messages through their memory: a
  /// collective takes latency plus bytes over bandwidth, as measured, and the
  /// cores that communicate do not compute.
  bool shares_memory = false;
  std::vector<MeshLink> mesh;  ///< empty: a switch
  /// Between nodes: `nics_per_node` of them, shared by the node's devices.
  LinkSpec network;
  int nics_per_node = 1;
  /// Between a device and its host.
  LinkSpec host_link;
  DeviceSpec host;  ///< the CPU of one node, shared by its devices
  Software software;
  std::vector<Fault> faults;
  /// Each operation's time is multiplied by 1 + jitter * u, u in [0, 1) drawn
  /// from (seed, rank, number of the operation).
  double jitter = 0;
  std::uint64_t jitter_seed = 0;
};

}  // namespace shardbook::sim
