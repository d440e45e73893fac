#include <algorithm>
#include <utility>

#include "core/check.h"
#include "sim/internal/sources.h"

namespace shardbook::sim::internal {

namespace {

// Limits far beyond existing machines, to catch wrong digits and wrong units.
constexpr double kMaxBytesPerS = 1e15, kMaxFlops = 1e18, kMaxBytes = 1e15,
                 kMaxSeconds = 1;
constexpr int kMaxNodes = 1 << 20, kMaxDevicesPerNode = 1024, kMaxLinks = 64;

void read_trust(JsonObject& object, Trust& trust) {
  const std::vector<std::string> names = {"calibrated", "interpolated",
                                          "extrapolated"};
  std::string name = trust_name(trust);
  object.choice("trust", names, name);
  const auto chosen = std::find(names.begin(), names.end(), name);
  trust = static_cast<Trust>(chosen - names.begin());
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

/// {"gelu forward": {"us": 2.5, "us_per_MB": 100}, ...}
void read_operations(JsonObject& object, DeviceSpec& device) {
  const Json* json = object.find("operations");
  if (json == nullptr) return;
  const std::string where = object.where("operations");
  SB_CHECK(json->is_object(), where, ": ", printable(*json),
           " is not allowed; give {\"operation phase\": {\"us\": ...}}");
  device.operations.clear();
  const std::string path = where.substr(where.rfind(": ") + 2);
  for (const auto& [name, value] : json->items()) {
    JsonObject measured(value, object.file(), path + "/" + printable(name));
    double fixed_us = 0, us_per_MFLOP = 0, us_per_MB = 0;
    measured.number("us", 0, 1e9, fixed_us);
    measured.number("us_per_MFLOP", 0, 1e9, us_per_MFLOP);
    measured.number("us_per_MB", 0, 1e9, us_per_MB);
    measured.finish();
    device.operations[name] = {fixed_us * 1e-6, us_per_MFLOP * 1e-12,
                               us_per_MB * 1e-12};
  }
}

void read_device(const Json& json, const Source& source,
                 const std::string& path, Chain& chain, DeviceSpec& device) {
  JsonObject object(json, source.label, path);
  chain.extend("devices", object, source, [&](const Source& base) {
    read_device(parse_json(base.text, base.label), base, "", chain, device);
  });
  object.text("name", device.name);
  read_peaks(object, device);
  object.quantity("bandwidth", bytes_per_second(), kMaxBytesPerS, false,
                  device.memory_bytes_per_s);
  double capacity = static_cast<double>(device.memory_bytes);
  object.quantity("capacity", bytes(), kMaxBytes, false, capacity);
  device.memory_bytes = static_cast<std::int64_t>(capacity);
  object.quantity("launch", seconds(), kMaxSeconds, true, device.launch_s);
  object.quantity("kernel", seconds(), kMaxSeconds, true, device.kernel_s);
  read_tile(object, device);
  object.integer("units", 1, 1 << 20, device.num_units);
  object.number("matmul_efficiency", 0.001, 1, device.max_matmul_efficiency);
  object.number("grouped_efficiency", 0.01, 1, device.grouped_efficiency);
  object.number("half_k", 0, 1e6, device.half_k);
  object.integer("alignment_bytes", 1, 4096, device.alignment_bytes);
  object.number("misaligned_efficiency", 0.001, 1,
                device.misaligned_efficiency);
  object.number("attention_efficiency", 0.001, 1,
                device.max_attention_efficiency);
  object.number("memory_efficiency", 0.001, 1, device.memory_efficiency);
  object.quantity("half_memory", bytes(), kMaxBytes, true,
                  device.half_memory_bytes);
  object.number("sustained", 0.001, 1, device.sustained);
  object.number("fp8_speedup", 0, 16, device.fp8_speedup);
  read_operations(object, device);
  read_trust(object, device.trust);
  object.finish();
}

template <typename Part>
using ReadPart = void (*)(const Json& json, const Source& source,
                          const std::string& path, Chain& chain, Part& part);

/// `key` holds an object, or the name of a preset of `folder`.
template <typename Part>
void read_at(const std::string& key, const std::string& folder,
             JsonObject& object, const Source& source, Chain& chain,
             ReadPart<Part> read, Part& part) {
  const Json* json = object.find(key);
  if (json == nullptr) return;
  if (json->is_object()) {
    read(*json, source, "/" + key, chain, part);
    return;
  }
  std::string name;
  object.text(key, name);
  part = Part();
  chain.follow(folder, name, source, object.where(key) + ": ",
               [&](const Source& base) {
                 read(parse_json(base.text, base.label), base, "", chain, part);
               });
}

void read_link_fields(JsonObject& object, LinkSpec& link) {
  object.quantity("bandwidth", bytes_per_second(), kMaxBytesPerS, false,
                  link.bytes_per_s);
  object.quantity("latency", seconds(), kMaxSeconds, true, link.latency_s);
  object.quantity("start", seconds(), kMaxSeconds, true, link.start_s);
  object.quantity("ll128_start", seconds(), kMaxSeconds, true,
                  link.ll128_start_s);
  object.number("ll128_share", 0.001, 1, link.ll128_share);
  object.quantity("nccl", bytes_per_second(), kMaxBytesPerS, true,
                  link.nccl_bytes_per_s);
  object.number("efficiency", 0.001, 1, link.efficiency);
  object.number("last_step", 0, 10, link.last_step);
  object.quantity("reduction", bytes_per_second(), kMaxBytesPerS, true,
                  link.reduction_bytes_per_s);
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

void read_intra_node(JsonObject& object, Cluster& cluster) {
  const std::string before = cluster.intra_node.name.empty()     ? ""
                             : cluster.shares_memory             ? "memory"
                             : cluster.intra_node.name == "pcie" ? "pcie"
                             : cluster.intra_node.name == "flat" ? "flat"
                             : cluster.mesh.empty()              ? "switch"
                                                                 : "mesh";
  std::string kind = before;
  object.choice("kind", {"switch", "mesh", "pcie", "memory", "flat"}, kind);
  // The constants of one kind of link do not apply to another.
  if (kind != before) {
    cluster.intra_node = LinkSpec();
    cluster.mesh.clear();
  }
  cluster.shares_memory = kind == "memory";
  cluster.intra_node.name =
      kind == "switch" || kind == "mesh" ? "nvlink" : kind;
  read_link_fields(object, cluster.intra_node);
  if (kind == "mesh") read_mesh(object, cluster);
  SB_CHECK(!kind.empty(), object.where("kind"),
           ": missing; give switch, mesh, pcie, memory or flat");
  SB_CHECK(kind != "mesh" || !cluster.mesh.empty(), object.where("links"),
           ": missing; a mesh needs its links: [[device, device, number]]");
}

void read_network(JsonObject& object, Cluster& cluster) {
  object.integer("nics_per_node", 1, kMaxDevicesPerNode, cluster.nics_per_node);
  read_link_fields(object, cluster.network);
}

void read_host_link(JsonObject& object, Cluster& cluster) {
  read_link_fields(object, cluster.host_link);
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

void read_software(const Json& json, const Source& source,
                   const std::string& path, Chain& chain, Software& software) {
  JsonObject object(json, source.label, path);
  chain.extend("software", object, source, [&](const Source& base) {
    read_software(parse_json(base.text, base.label), base, "", chain, software);
  });
  object.text("name", software.name);
  object.flag("fused_attention", software.fused_attention);
  object.flag("fused_loss", software.fused_loss);
  object.flag("fused_merge", software.fused_merge);
  object.quantity("member", seconds(), kMaxSeconds, true, software.member_s);
  object.flag("fused_elementwise", software.fused_elementwise);
  if (const Json* devices = object.find("on")) {
    const std::string where = object.where("on");
    SB_CHECK(devices->is_object(), where, ": ", printable(*devices),
             " is not allowed; give {\"h100-80gb\": {...}}, keys of devices");
    for (const auto& [name, keys] : devices->items()) {
      const Source of = {keys.dump(), source.label + " on " + name, ""};
      DeviceSpec device;
      Chain own(false);
      read_device(keys, of, "", own, device);  // its keys are known
      software.on_device.emplace_back(name, of.text);
    }
  }
  object.flag("is_synchronous", software.is_synchronous);
  object.flag("overlaps_gradients", software.overlaps_gradients);
  object.flag("overlaps_tensor", software.overlaps_tensor);
  object.flag("scatters_messages", software.scatters_messages);
  object.flag("sends_once_per_node", software.sends_once_per_node);
  object.flag("scales_by_maximum", software.scales_by_maximum);
  object.flag("waits_for_messages", software.waits_for_messages);
  object.flag("sums_in_f32", software.sums_in_f32);
  object.flag("fetches_modules", software.fetches_modules);
  object.finish();
}

void read_jitter(JsonObject& object, Cluster& cluster) {
  object.number("amount", 0, 100, cluster.jitter);
  int seed = static_cast<int>(cluster.jitter_seed);
  object.integer("seed", 0, 2147483647, seed);
  cluster.jitter_seed = static_cast<std::uint64_t>(seed);
}

}  // namespace

void apply_software(Cluster& cluster) {
  Chain chain(false);
  for (const auto& [name, text] : cluster.software.on_device) {
    if (name != cluster.device.name) continue;
    const Source source = {text, cluster.software.name + " on " + name, ""};
    read_device(parse_json(text, source.label), source, "", chain,
                cluster.device);
  }
}

void read_software(const Source& source, Chain& chain, Software& software) {
  read_software(parse_json(source.text, source.label), source, "", chain,
                software);
}

void read_cluster(const Source& source, Chain& chain, Cluster& cluster) {
  const Json json = parse_json(source.text, source.label);
  JsonObject object(json, source.label, "");
  chain.extend("clusters", object, source,
               [&](const Source& base) { read_cluster(base, chain, cluster); });
  cluster.name = source.label;  // not that of the file which it extends
  object.text("name", cluster.name);
  object.integer("nodes", 1, kMaxNodes, cluster.num_nodes);
  object.integer("devices_per_node", 1, kMaxDevicesPerNode,
                 cluster.devices_per_node);
  read_at("device", "devices", object, source, chain, read_device,
          cluster.device);
  read_at("host", "devices", object, source, chain, read_device, cluster.host);
  read_at("software", "software", object, source, chain, read_software,
          cluster.software);
  using Part = void (*)(JsonObject&, Cluster&);
  const std::vector<std::pair<std::string, Part>> parts = {
      {"intra_node", read_intra_node},
      {"network", read_network},
      {"jitter", read_jitter},
      {"host_link", read_host_link}};
  for (const auto& [key, read_part] : parts) {
    if (const Json* json = object.find(key)) {
      JsonObject part(*json, source.label, "/" + key);
      read_part(part, cluster);
      part.finish();
    }
  }
  read_faults(object, cluster);
  object.finish();
}

}  // namespace shardbook::sim::internal
