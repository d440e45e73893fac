#include "sim/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "sim/internal/presets.h"
#include "sim/internal/sources.h"
#include "sim/json_object.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::sim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// The error message from reading the text.
using shardbook::error_of;
std::string error_of(const std::string& text) {
  return error_of([&] { Cluster::from_json(text, "my.json"); });
}

/// A preset with some changes.
std::string changed(const std::string& rest,
                    const std::string& base = "dgx-a100") {
  return "{\"extends\": \"" + base + "\", " + rest + "}";
}

class ClusterPresets : public testing::TestWithParam<std::string> {};

TEST_P(ClusterPresets, AreComplete) {
  const Cluster cluster = Cluster::read(GetParam());
  EXPECT_EQ(cluster.name, GetParam());
  EXPECT_GT(cluster.num_devices(), 1);
  if (cluster.name == "textbook") return;  // an ideal machine: no losses
  EXPECT_GT(cluster.device.peak_flops.at(DType::kF32), 1e12);
  EXPECT_GT(cluster.device.memory_bytes_per_s, 1e11);
  EXPECT_GT(cluster.device.launch_s, 0);
  EXPECT_GT(cluster.device.half_k, 0);
  EXPECT_GT(cluster.intra_node.speed(), 1e9);
  EXPECT_LT(cluster.intra_node.speed(), cluster.intra_node.bytes_per_s);
  EXPECT_GT(cluster.host_link.speed(), 1e9);
  EXPECT_GT(cluster.host.memory_bytes, cluster.device.memory_bytes);
}

INSTANTIATE_TEST_SUITE_P(All, ClusterPresets,
                         testing::ValuesIn(internal::names_in("clusters")),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) {
                             if (c == '-') c = '_';
                           }
                           return name;
                         });

/// Objects that contain numbers but no remark.
void find_bare_numbers(const json_file::Json& json, const std::string& path,
                       std::vector<std::string>& bare) {
  bool has_number = false, has_remark = false;
  for (const auto& [key, value] : json.items()) {
    has_number |= value.is_number();
    has_remark |= key[0] == '_';
    // Remarks on peaks and operations are next to these objects.
    if (value.is_object() && key != "peak_TFLOPS" && key != "operations") {
      find_bare_numbers(value, path + "/" + key, bare);
    }
  }
  if (has_number && !has_remark) bare.push_back(path);
}

void drop_notes(nlohmann::json& json) {
  for (auto each = json.begin(); each != json.end();) {
    const bool is_note = json.is_object() && each.key()[0] == '_';
    if (!is_note && each->is_structured()) drop_notes(*each);
    each = is_note ? json.erase(each) : std::next(each);
  }
}

TEST(ClusterPresets, SayWhereTheirConstantsComeFrom) {
  std::vector<std::string> bare;
  for (const internal::Preset& preset : internal::presets()) {
    const std::string path = std::string(SHARDBOOK_ROOT) + "/sim/" +
                             preset.folder + "/" + preset.name + ".json";
    nlohmann::json file =
        json_file::parse_json(internal::read_file(path), preset.name);
    find_bare_numbers(file, preset.name, bare);
    // The library has all but the notes
    drop_notes(file);
    nlohmann::json own = json_file::parse_json(preset.text, preset.name);
    drop_notes(own);
    EXPECT_EQ(own, file) << preset.name;
  }
  EXPECT_THAT(bare, testing::IsEmpty());
}

TEST(ClusterPresets, SeleneIsAsPublished) {
  const Cluster selene = Cluster::read("selene");
  EXPECT_EQ(selene.num_devices(), 4480);
  EXPECT_EQ(selene.device.name, "a100-80gb");
  EXPECT_DOUBLE_EQ(selene.device.peak_flops.at(DType::kBF16), 312e12);
  EXPECT_EQ(selene.device.memory_bytes, 80'000'000'000);
  EXPECT_DOUBLE_EQ(selene.network.bytes_per_s, 25e9);
  EXPECT_EQ(selene.nics_per_node, 8);
  EXPECT_FALSE(selene.software.fused_attention);
  EXPECT_EQ(selene.node_of(17), 2);
}

// The cluster's own, or another one in its place; a device keeps what the software
// does not say.
TEST(ClusterPresets, AnotherSoftwareTrains) {
  const Cluster own = Cluster::read("selene");
  EXPECT_EQ(own.software.name, "megatron-lm-2021");
  EXPECT_DOUBLE_EQ(own.device.sustained, 0.80);
  const Cluster later = Cluster::read("selene+megatron-lm-2022");
  EXPECT_EQ(later.name, "selene+megatron-lm-2022");
  EXPECT_FALSE(later.software.fused_attention);
  EXPECT_DOUBLE_EQ(later.device.sustained, 0.90);
  // Nothing of the cluster's own stays
  const Cluster meta = Cluster::read("grand-teton-h100+nemo");
  EXPECT_DOUBLE_EQ(meta.device.sustained,
                   Cluster::read("dgx-h100").device.sustained);
  EXPECT_FALSE(meta.software.sums_in_f32);
  EXPECT_DOUBLE_EQ(Cluster::read("vtrain-a100").device.launch_s, 56e-6);
  // What is said of H100s changes no other device
  const DeviceSpec h100 = Cluster::read("dgx-h100+llm-foundry").device;
  EXPECT_DOUBLE_EQ(h100.sustained, 0.71);
  const DeviceSpec a100 = Cluster::read("dgx-a100+llm-foundry").device;
  EXPECT_DOUBLE_EQ(a100.sustained, 0.80);
  EXPECT_THAT(error_of([] { Cluster::read("selene+nem"); }),
              HasSubstr("software \"nem\" is unknown; did you mean \"nemo\"?"));
}

TEST(ClusterPresets, EachV100HasSixLinks) {
  const Cluster cluster = Cluster::read("dgx-v100");
  std::vector<int> links(8);
  for (const MeshLink& link : cluster.mesh) {
    links[static_cast<std::size_t>(link.a)] += link.count;
    links[static_cast<std::size_t>(link.b)] += link.count;
  }
  EXPECT_EQ(links, std::vector<int>(8, 6));
}

TEST(ClusterFile, KeepsWhatItDoesNotSay) {
  const Cluster cluster =
      Cluster::from_json(changed(R"("name": "small", "nodes": 2,
        "network": {"nics_per_node": 1, "bandwidth_Gb_per_s": 100},
        "device": {"extends": "a100-40gb", "launch_us": 20},
        "jitter": {"amount": 0.1, "seed": 7},
        "faults": [{"rank": 3, "compute_slowdown": 2}])"),
                         "my.json");
  const Cluster base = Cluster::read("dgx-a100");
  EXPECT_EQ(cluster.name, "small");
  EXPECT_EQ(cluster.num_devices(), 16);
  EXPECT_EQ(cluster.nics_per_node, 1);
  EXPECT_DOUBLE_EQ(cluster.network.bytes_per_s, 12.5e9);
  EXPECT_DOUBLE_EQ(cluster.network.latency_s, base.network.latency_s);
  EXPECT_DOUBLE_EQ(cluster.device.launch_s, 20e-6);
  EXPECT_DOUBLE_EQ(cluster.device.memory_bytes_per_s, 1.555e12);
  EXPECT_DOUBLE_EQ(cluster.device.half_k, base.device.half_k);
  EXPECT_DOUBLE_EQ(cluster.intra_node.bytes_per_s, base.intra_node.bytes_per_s);
  EXPECT_DOUBLE_EQ(cluster.jitter, 0.1);
  EXPECT_EQ(cluster.jitter_seed, 7u);
  ASSERT_EQ(cluster.faults.size(), 1u);
  EXPECT_EQ(cluster.faults[0].rank, 3);
  EXPECT_DOUBLE_EQ(cluster.faults[0].compute_slowdown, 2);
  EXPECT_DOUBLE_EQ(cluster.faults[0].link_slowdown, 1);
}

TEST(ClusterFile, MayBeNestedInSixtyFourLevels) {
  const auto nested = [](std::size_t levels, const std::string& inside) {
    return std::string(levels, '[') + inside + std::string(levels, ']');
  };
  EXPECT_FALSE(json_file::is_too_deep(nested(64, "1")));

  EXPECT_TRUE(json_file::is_too_deep(nested(64, "{}")));
  // Siblings, and brackets inside strings
  std::string flat = "[";
  for (int i = 0; i < 100; ++i) flat += "[], {},";
  EXPECT_FALSE(json_file::is_too_deep(flat));
  EXPECT_FALSE(json_file::is_too_deep(R"(["\\", "a\"[)" +
                                      std::string(100, '[') + "\"]"));
}

TEST(ClusterFile, EmptyFilesAreNotJson) {
  const TempFolder temporary;
  const std::string file = temporary / "empty.json";
  std::ofstream(file).close();
  const std::string error = error_of([&] { Cluster::read(file); });
  EXPECT_THAT(error, HasSubstr("not JSON"));
}

TEST(ClusterFile, AnotherKindOfLinkStartsAfresh) {
  const Cluster cluster = Cluster::from_json(
      changed(R"("intra_node": {"kind": "pcie", "bandwidth_GB_per_s": 31})"),
      "my.json");
  EXPECT_EQ(cluster.intra_node.name, "pcie");
  EXPECT_DOUBLE_EQ(cluster.intra_node.efficiency, 1);
  EXPECT_EQ(cluster.intra_node.trust, Trust::kInterpolated);
}

TEST(ClusterFile, MayExtendAFileNextToIt) {
  const TempFolder temporary;
  const std::filesystem::path folder = temporary.path();
  std::filesystem::create_directories(folder / "deeper");
  auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  write("deeper/base.json", changed(R"("nodes": 5)", "dgx-h100"));
  write("top.json", changed(R"("name": "top")", "deeper/base.json"));
  write("a.json", changed(R"("name": "a")", "b.json"));
  write("b.json", changed(R"("name": "b")", "a.json"));
  write("self.json", changed(R"("name": "self")", "self.json"));
  EXPECT_EQ(Cluster::read((folder / "top.json").string()).num_nodes, 5);
  for (const char* name : {"a.json", "self.json"}) {
    const std::string error =
        error_of([&] { Cluster::read((folder / name).string()); });
    EXPECT_THAT(error, AllOf(HasSubstr("/extends: "),
                             HasSubstr("leads back to a file that extends")));
  }
  EXPECT_THROW(Cluster::read((folder / "absent.json").string()), Error);
  EXPECT_THROW(Cluster::read(folder.string()), Error);
}

TEST(ClusterFile, ThisMachineSaysHowToMakeIt) {
  const TempFolder temporary;
  const std::string folder = temporary / "cache";
  const char* before = std::getenv("XDG_CACHE_HOME");
  const std::string saved = before == nullptr ? "" : before;
  setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  const std::string file = Cluster::this_machine_file();
  EXPECT_EQ(file, folder + "/shardbook/this-machine.json");
  const std::string error = error_of([&] { Cluster::read("this-machine"); });
  EXPECT_THAT(error, AllOf(HasSubstr(file), HasSubstr("./shardbook bench")));
  std::filesystem::create_directories(folder + "/shardbook");
  std::ofstream(file) << changed(R"("name": "here")", "kaggle-t4x2");
  EXPECT_EQ(Cluster::read("this-machine").name, "here");
  if (before == nullptr) {
    unsetenv("XDG_CACHE_HOME");
  } else {
    setenv("XDG_CACHE_HOME", saved.c_str(), 1);
  }
}

struct BadFile {
  const char* what;
  std::string text;
  const char* path;  ///< where in the file
  const char* hint;  ///< another part of the message
};

void PrintTo(const BadFile& file, std::ostream* out) { *out << file.text; }

class ClusterErrors : public testing::TestWithParam<BadFile> {};

TEST_P(ClusterErrors, NameThePathTheValueAndWhatIsAllowed) {
  EXPECT_THAT(error_of(GetParam().text),
              AllOf(StartsWith("my.json: "), HasSubstr(GetParam().path),
                    HasSubstr(GetParam().hint)));
}

const std::vector<BadFile>& bad_files() {
  static const std::vector<BadFile> files = {
      {"NotJson", "{\"nodes\": 2,\n  oops}", "line 2, column 3", "not JSON"},
      {"NoObject", "[1]", "/", "give an object"},
      {"NotANumber", "{\"nodes\": NaN}", "line 1", "not JSON"},
      {"NoComputerHasIt",
       changed(R"("network": {"bandwidth_GB_per_s": 1e999})"), "a number",
       "too large"},
      {"KeyTwice", R"({"nodes": 1, "nodes": 2})", "\"nodes\"", "twice"},
      {"WrongUnit", changed(R"("network": {"latency_min": 5})"),
       "/network/latency_min",
       "\"min\" is unknown; after \"latency_\" give s, "
       "ms, us or ns"},
      {"WrongUnitOfBandwidth",
       changed(R"("network": {"bandwidth_GB_per_h": 5})"),
       "/network/bandwidth_GB_per_h", "give MB_per_s"},
      {"TwoUnits", changed(R"("network": {"bandwidth_GB_per_s": 5,
                              "bandwidth_Gb_per_s": 40})"),
       "/network/bandwidth_Gb_per_s", "says the same"},
      {"Negative", changed(R"("network": {"bandwidth_GB_per_s": -25})"),
       "/network/bandwidth_GB_per_s", "-25 is not allowed"},
      {"Zero", changed(R"("intra_node": {"bandwidth_GB_per_s": 0})"),
       "/intra_node/bandwidth_GB_per_s", "above 0"},
      {"Huge", changed(R"("intra_node": {"bandwidth_GB_per_s": 1e12})"),
       "/intra_node/bandwidth_GB_per_s", "from 0 to 1e+06"},
      {"WrongType", changed(R"("network": {"latency_us": "5"})"),
       "/network/latency_us", "\"5\" is not allowed; give a number"},
      {"ListForObject", changed(R"("network": [25])"), "/network",
       "a list is not allowed; give an object"},
      {"HalfANode", changed(R"("nodes": 1.5)"), "/nodes", "a whole number"},
      {"HugeWholeNumber", changed(R"("nodes": 18446744073709551615)"), "/nodes",
       "a whole number"},
      {"TooManyDevices", changed(R"("nodes": 1048576)"), "/nodes", "more than"},
      {"UnknownKey", changed(R"("netwrok": {})"), "/netwrok",
       "did you mean \"network\"?"},
      {"UnknownKeyInside", changed(R"("network": {"nics": 4})"),
       "/network/nics", "did you mean \"nics_per_node\"?"},
      {"UnknownPreset", changed(R"("nodes": 2)", "dgx-a10"), "/extends",
       "did you mean \"dgx-a100\"?"},
      {"UnknownDevice", changed(R"("device": "a100")"), "/device",
       "\"a100\" is unknown"},
      {"FileInText", changed(R"("nodes": 2)", "other.json"), "/extends",
       "only presets"},
      {"UnknownType", changed(R"("device": {"peak_TFLOPS": {"f8": 1}})"),
       "/device/peak_TFLOPS/f8", "give f64, f32, bf16 or f16"},
      {"UnknownKind", changed(R"("intra_node": {"kind": "torus"})"),
       "/intra_node/kind", "give switch, mesh, pcie, memory or flat"},
      {"NoLinks", changed(R"("intra_node": {"kind": "mesh",
                                            "bandwidth_GB_per_s": 25})"),
       "/intra_node/links", "a mesh needs its links"},
      {"MissingLink",
       changed(R"("devices_per_node": 4, "intra_node": {
           "links": [[0, 1, 1], [2, 3, 1]]})",
               "dgx-v100"),
       "/intra_node/links", "no way leads from device 0 to device 2"},
      {"LinkToNowhere", changed(R"("devices_per_node": 4)", "dgx-v100"),
       "/intra_node/links", "device 4 does not exist"},
      {"LinkToItself",
       changed(R"("intra_node": {"links": [[1, 1, 1]]})", "dgx-v100"),
       "/intra_node/links/0", "with itself"},
      {"LinkTwice",
       changed(R"("intra_node": {
           "links": [[0, 1, 1], [1, 0, 2]]})",
               "dgx-v100"),
       "/intra_node/links/1", "linked twice"},
      {"NoNetwork", changed(R"("nodes": 2)", "kaggle-t4x2"),
       "/network/bandwidth_GB_per_s", "2 nodes need a network"},
      {"NoDevice", R"({"nodes": 1})", "/device/peak_TFLOPS", "missing"},
      {"FaultWithoutRank", changed(R"("faults": [{"link_slowdown": 2}])"),
       "/faults/0/rank", "missing"},
      {"FaultOfNobody", changed(R"("nodes": 1, "faults": [{"rank": 8}])"),
       "/faults/0/rank", "give 0 to 7"},
      {"RemarkWithNumber", changed(R"("_why": 3)"), "/_why", "a remark"}};
  return files;
}

INSTANTIATE_TEST_SUITE_P(All, ClusterErrors, testing::ValuesIn(bad_files()),
                         [](const auto& info) {
                           return std::string(info.param.what);
                         });

}  // namespace
}  // namespace shardbook::sim
