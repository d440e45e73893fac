#pragma once

// The files of sim/clusters, devices and software, built into the library.

#include <string>
#include <vector>

namespace shardbook::sim::internal {

struct Preset {
  std::string folder;  ///< "clusters", "devices", "software"
  std::string name;    ///< "dgx-a100"
  const char* text;
};
const std::vector<Preset>& presets();

}  // namespace shardbook::sim::internal
