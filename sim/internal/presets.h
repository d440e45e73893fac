#pragma once

// The files of sim/clusters and sim/devices, built into the library.

#include <string>
#include <vector>

namespace shardbook::sim::internal {

struct Preset {
  std::string folder;  ///< "clusters", "devices"
  std::string name;    ///< "dgx-a100"
  const char* text;
};
const std::vector<Preset>& presets();

}  // namespace shardbook::sim::internal
