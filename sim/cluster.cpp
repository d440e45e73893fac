// Clusters as JSON files: presets, files, and what extends them.

#include "sim/cluster.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/check.h"
#include "sim/internal/json_object.h"
#include "sim/internal/presets.h"

namespace shardbook::sim {

using internal::integer_at;
using internal::Json;
using internal::JsonObject;
using internal::nearest;
using internal::number_at;
using internal::printable;

namespace {

constexpr const char* kThisMachine = "this-machine";
// Limits far beyond what exists, against slips of the pen and of units.
constexpr double kMaxBytesPerS = 1e15, kMaxFlops = 1e18, kMaxBytes = 1e15,
                 kMaxSeconds = 1;
constexpr int kMaxNodes = 1 << 20, kMaxDevicesPerNode = 1024,
              kMaxDevices = 1 << 20, kMaxLinks = 64;
constexpr std::uintmax_t kMaxFileBytes = 1 << 20;

bool is_file_name(const std::string& name) {
  constexpr const char* kEnding = ".json";
  return name.size() > 5 && name.compare(name.size() - 5, 5, kEnding) == 0;
}

/// One file of a chain in which each extends the next.
struct Source {
  std::string text;
  std::string label;      ///< for messages
  std::string directory;  ///< that `extends` is relative to
};

std::string read_file(const std::string& file) {
  std::error_code error;
  SB_CHECK(std::filesystem::is_regular_file(file, error), file,
           ": is not a file that can be read");
  SB_CHECK(std::filesystem::file_size(file, error) <= kMaxFileBytes, file,
           ": is larger than 1 MiB, which no description of a cluster is");
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  SB_CHECK(stream.good() && text.good(), file, ": cannot be read");
  return text.str();
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const internal::Preset& preset : internal::presets()) {
    if (preset.folder == folder) names.push_back(preset.name);
  }
  return names;
}

/// Finds what a file calls `name`. `where` says who asks, for messages.
Source find_source(const std::string& folder, const std::string& name,
                   const std::string& directory, const std::string& where) {
  for (const internal::Preset& preset : internal::presets()) {
    if (preset.folder == folder && preset.name == name) {
      return {preset.text, "preset " + name, ""};
    }
  }
  if (is_file_name(name)) {
    const std::filesystem::path path =
        std::filesystem::path(directory) / std::filesystem::path(name);
    return {read_file(path.string()), path.string(),
            path.parent_path().string()};
  }
  std::vector<std::string> known = names_in(folder);
  if (folder == "clusters") known.push_back(kThisMachine);
  const std::string guess = nearest(name, known);
  std::string list;
  for (const std::string& known_name : known) {
    list += (list.empty() ? "" : ", ") + known_name;
  }
  SB_FAIL(where, "\"", printable(name), "\" is unknown; ",
          guess.empty() ? "" : "did you mean \"" + guess + "\"? ",
          "Give a FILE.json or one of ", list);
}

/// Applies what `json` extends, then leaves the rest to the caller. `chain`
/// holds the labels of the files that led here.
class Chain {
 public:
  explicit Chain(bool files_allowed) : files_allowed_(files_allowed) {}

  template <typename Apply>
  void extend(const std::string& folder, JsonObject& object,
              const std::string& label, const std::string& directory,
              const Apply& apply) {
    std::string base;
    object.text("extends", base);
    if (object.find("extends") != nullptr) {
      follow(folder, base, label, directory, object.where("extends") + ": ",
             apply);
    }
  }

  template <typename Apply>
  void follow(const std::string& folder, const std::string& name,
              const std::string& label, const std::string& directory,
              const std::string& where, const Apply& apply) {
    SB_CHECK(files_allowed_ || !is_file_name(name), where, "\"",
             printable(name), "\" is a file; only presets can be named here");
    const Source source = find_source(folder, name, directory, where);
    SB_CHECK(source.label != label && std::find(labels_.begin(), labels_.end(),
                                                source.label) == labels_.end(),
             where, "\"", printable(name),
             "\" leads back to a file that extends this one");
    labels_.push_back(label);
    apply(source);
    labels_.pop_back();
  }

 private:
  bool files_allowed_;
  std::vector<std::string> labels_;
};

void read_trust(JsonObject& object, Trust& trust) {
  std::string name = trust_name(trust);
  object.choice("trust", {"calibrated", "interpolated", "extrapolated"}, name);
  for (const Trust other :
       {Trust::kCalibrated, Trust::kInterpolated, Trust::kExtrapolated}) {
    if (name == trust_name(other)) trust = other;
  }
}

void read_peaks(JsonObject& object, DeviceSpec& device) {
  const Json* json = object.find("peak_TFLOPS");
  if (json == nullptr) return;
  const std::string where = object.where("peak_TFLOPS");
  SB_CHECK(json->is_object() && !json->empty(), where,
           ": give an object such as {\"f32\": 19.5, \"bf16\": 312}");
  device.peak_flops.clear();
  for (const auto& [name, value] : json->items()) {
    SB_CHECK(name == "f64" || name == "f32" || name == "bf16" || name == "f16",
             where, "/", printable(name),
             ": is no floating-point type; give f64, f32, bf16 or f16");
    const double peak =
        number_at(value, where + "/" + name, 1e-6, kMaxFlops / 1e12);
    device.peak_flops[dtype_from_name(name)] = peak * 1e12;
  }
}

void read_tile(JsonObject& object, DeviceSpec& device) {
  const Json* json = object.find("tile");
  if (json == nullptr) return;
  const std::string where = object.where("tile");
  SB_CHECK(json->is_array() && json->size() == 2, where, ": ", printable(*json),
           " is not allowed; give [rows, columns]");
  device.tile_m = static_cast<int>(integer_at((*json)[0], where, 1, 4096));
  device.tile_n = static_cast<int>(integer_at((*json)[1], where, 1, 4096));
}

void read_device(const Json& json, const Source& source,
                 const std::string& path, Chain& chain, DeviceSpec& device) {
  JsonObject object(json, source.label, path);
  chain.extend("devices", object, source.label, source.directory,
               [&](const Source& base) {
                 read_device(internal::parse_json(base.text, base.label), base,
                             "", chain, device);
               });
  object.text("name", device.name);
  read_peaks(object, device);
  object.quantity("bandwidth", internal::bytes_per_second(), kMaxBytesPerS,
                  false, device.memory_bytes_per_s);
  double capacity = static_cast<double>(device.memory_bytes);
  object.quantity("capacity", internal::bytes(), kMaxBytes, false, capacity);
  device.memory_bytes = static_cast<std::int64_t>(capacity);
  object.quantity("launch", internal::seconds(), kMaxSeconds, true,
                  device.launch_s);
  object.quantity("kernel", internal::seconds(), kMaxSeconds, true,
                  device.kernel_s);
  read_tile(object, device);
  object.integer("units", 1, 1 << 20, device.num_units);
  object.number("matmul_efficiency", 0.001, 1, device.max_matmul_efficiency);
  object.number("half_k", 0, 1e6, device.half_k);
  object.integer("alignment_bytes", 1, 4096, device.alignment_bytes);
  object.number("misaligned_efficiency", 0.001, 1,
                device.misaligned_efficiency);
  object.number("attention_efficiency", 0.001, 1,
                device.max_attention_efficiency);
  object.number("memory_efficiency", 0.001, 1, device.memory_efficiency);
  object.quantity("half_memory", internal::bytes(), kMaxBytes, true,
                  device.half_memory_bytes);
  object.number("sustained", 0.001, 1, device.sustained);
  read_trust(object, device.trust);
  object.finish();
}

/// `key` holds the name of a device or an object.
void read_device_at(const std::string& key, JsonObject& object,
                    const Source& source, Chain& chain, DeviceSpec& device) {
  const Json* json = object.find(key);
  if (json == nullptr) return;
  if (json->is_object()) {
    read_device(*json, source, "/" + key, chain, device);
    return;
  }
  std::string name;
  object.text(key, name);
  device = DeviceSpec();
  chain.follow("devices", name, source.label, source.directory,
               object.where(key) + ": ", [&](const Source& base) {
                 read_device(internal::parse_json(base.text, base.label), base,
                             "", chain, device);
               });
}

void read_link_fields(JsonObject& object, LinkSpec& link) {
  object.quantity("bandwidth", internal::bytes_per_second(), kMaxBytesPerS,
                  false, link.bytes_per_s);
  object.quantity("latency", internal::seconds(), kMaxSeconds, true,
                  link.latency_s);
  object.quantity("start", internal::seconds(), kMaxSeconds, true,
                  link.start_s);
  object.number("efficiency", 0.001, 1, link.efficiency);
  object.number("last_step", 0, 10, link.last_step);
  object.quantity("reduction", internal::bytes_per_second(), kMaxBytesPerS,
                  true, link.reduction_bytes_per_s);
  object.integer("measured_ranks", 0, kMaxDevices, link.measured_ranks);
  read_trust(object, link.trust);
}

/// [[first device, second device, number of links], ...]
void read_mesh(JsonObject& object, Cluster& cluster) {
  const Json* json = object.find("links");
  if (json == nullptr) return;
  const std::string where = object.where("links");
  SB_CHECK(json->is_array() && !json->empty(), where,
           ": give a list of [device, device, number of links]");
  cluster.mesh.clear();
  for (const Json& item : *json) {
    const std::string at = where + "/" + std::to_string(cluster.mesh.size());
    SB_CHECK(item.is_array() && item.size() == 3, at, ": ", printable(item),
             " is not allowed; give [device, device, number of links]");
    MeshLink link;
    link.a = static_cast<int>(integer_at(item[0], at, 0, kMaxDevicesPerNode));
    link.b = static_cast<int>(integer_at(item[1], at, 0, kMaxDevicesPerNode));
    link.count = static_cast<int>(integer_at(item[2], at, 1, kMaxLinks));
    SB_CHECK(link.a != link.b, at, ": links device ", link.a, " with itself");
    for (const MeshLink& other : cluster.mesh) {
      SB_CHECK(std::minmax(link.a, link.b) != std::minmax(other.a, other.b), at,
               ": devices ", link.a, " and ", link.b,
               " are linked twice; give the number of their links once");
    }
    cluster.mesh.push_back(link);
  }
}

void read_intra_node(const Json& json, const Source& source, Cluster& cluster) {
  JsonObject object(json, source.label, "/intra_node");
  const std::string before = cluster.intra_node.name.empty()     ? ""
                             : cluster.intra_node.name == "pcie" ? "pcie"
                             : cluster.mesh.empty()              ? "switch"
                                                                 : "mesh";
  std::string kind = before;
  object.choice("kind", {"switch", "mesh", "pcie"}, kind);
  // What is known of one kind of link says nothing about another.
  if (kind != before) {
    cluster.intra_node = LinkSpec();
    cluster.mesh.clear();
  }
  cluster.intra_node.name = kind == "pcie" ? "pcie" : "nvlink";
  read_link_fields(object, cluster.intra_node);
  if (kind == "mesh") read_mesh(object, cluster);
  SB_CHECK(!kind.empty(), object.where("kind"),
           ": missing; give switch, mesh or pcie");
  SB_CHECK(kind != "mesh" || !cluster.mesh.empty(), object.where("links"),
           ": missing; a mesh needs its links: [[device, device, number]]");
  object.finish();
}

void read_network(const Json& json, const Source& source, Cluster& cluster) {
  JsonObject object(json, source.label, "/network");
  object.integer("nics_per_node", 1, kMaxDevicesPerNode, cluster.nics_per_node);
  read_link_fields(object, cluster.network);
  object.finish();
}

void read_faults(JsonObject& object, Cluster& cluster) {
  const Json* json = object.find("faults");
  if (json == nullptr) return;
  const std::string path = "/faults/";
  SB_CHECK(json->is_array(), object.where("faults"), ": ", printable(*json),
           " is not allowed; give a list of {\"rank\": ...}");
  cluster.faults.clear();
  for (const Json& item : *json) {
    JsonObject fault_object(item, object.file(),
                            path + std::to_string(cluster.faults.size()));
    Fault fault;
    fault_object.integer("rank", 0, kMaxDevices, fault.rank);
    fault_object.number("compute_slowdown", 1e-3, 1e6, fault.compute_slowdown);
    fault_object.number("link_slowdown", 1e-3, 1e6, fault.link_slowdown);
    fault_object.finish();
    SB_CHECK(item.contains("rank"), fault_object.where("rank"),
             ": missing; a fault needs the rank that has it");
    cluster.faults.push_back(fault);
  }
}

void read_software(const Json& json, const Source& source, Cluster& cluster) {
  JsonObject object(json, source.label, "/software");
  object.flag("fused_attention", cluster.fused_attention);
  object.quantity("member", internal::seconds(), kMaxSeconds, true,
                  cluster.member_s);
  object.finish();
}

void read_jitter(const Json& json, const Source& source, Cluster& cluster) {
  JsonObject object(json, source.label, "/jitter");
  object.number("amount", 0, 100, cluster.jitter);
  int seed = static_cast<int>(cluster.jitter_seed);
  object.integer("seed", 0, 2147483647, seed);
  cluster.jitter_seed = static_cast<std::uint64_t>(seed);
  object.finish();
}

void read_cluster(const Source& source, Chain& chain, Cluster& cluster) {
  const Json json = internal::parse_json(source.text, source.label);
  JsonObject object(json, source.label, "");
  chain.extend("clusters", object, source.label, source.directory,
               [&](const Source& base) { read_cluster(base, chain, cluster); });
  object.text("name", cluster.name);
  object.integer("nodes", 1, kMaxNodes, cluster.num_nodes);
  object.integer("devices_per_node", 1, kMaxDevicesPerNode,
                 cluster.devices_per_node);
  read_device_at("device", object, source, chain, cluster.device);
  read_device_at("host", object, source, chain, cluster.host);
  using Part = void (*)(const Json&, const Source&, Cluster&);
  const std::vector<std::pair<const char*, Part>> parts = {
      {"intra_node", read_intra_node},
      {"network", read_network},
      {"software", read_software},
      {"jitter", read_jitter}};
  for (const auto& [key, read_part] : parts) {
    const Json* part = object.find(key);
    if (part != nullptr) read_part(*part, source, cluster);
  }
  if (const Json* part = object.find("host_link")) {
    JsonObject link(*part, source.label, "/host_link");
    read_link_fields(link, cluster.host_link);
    link.finish();
  }
  read_faults(object, cluster);
  object.finish();
}

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
  for (int i = 0; i < cluster.devices_per_node; ++i) {
    island[static_cast<std::size_t>(i)] = i;
  }
  for (const MeshLink& link : cluster.mesh) {
    const int highest = std::max(link.a, link.b);
    SB_CHECK(highest < cluster.devices_per_node, where, "device ", highest,
             " does not exist; there are ", cluster.devices_per_node,
             " per node, numbered from 0");
    const int from = island[static_cast<std::size_t>(link.a)];
    const int to = island[static_cast<std::size_t>(link.b)];
    std::replace(island.begin(), island.end(), from, to);
  }
  for (int i = 1; i < cluster.devices_per_node; ++i) {
    SB_CHECK(island[static_cast<std::size_t>(i)] == island[0], where,
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

Cluster read_source(const Source& source, bool files_allowed) {
  Cluster cluster;
  cluster.network.name = "network";
  cluster.host_link.name = "pcie";
  Chain chain(files_allowed);
  read_cluster(source, chain, cluster);
  if (cluster.name.empty()) cluster.name = source.label;
  check_cluster(cluster, source.label);
  return cluster;
}

}  // namespace

const char* trust_name(Trust trust) {
  switch (trust) {
    case Trust::kCalibrated:
      return "calibrated";
    case Trust::kInterpolated:
      return "interpolated";
    default:
      return "extrapolated";
  }
}

Cluster Cluster::read(const std::string& name_or_file) {
  if (name_or_file == kThisMachine) {
    const std::string file = this_machine_file();
    std::error_code error;
    SB_CHECK(std::filesystem::exists(file, error),
             "cluster this-machine: ", file,
             " does not exist; `./shardbook bench this-machine` measures this "
             "machine and writes it");
    return read_source({read_file(file), file,
                        std::filesystem::path(file).parent_path().string()},
                       true);
  }
  return read_source(find_source("clusters", name_or_file, "", "cluster "),
                     true);
}

Cluster Cluster::from_json(const std::string& text, const std::string& label) {
  return read_source({text, label, ""}, false);
}

std::vector<std::string> Cluster::preset_names() {
  return names_in("clusters");
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
