#pragma once

// Finds descriptions (presets in the library, files, and those that they
// extend) and reads their keys into the fields of a Cluster.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/cluster.h"
#include "sim/json_object.h"

namespace shardbook::sim::internal {

using namespace json_file;

/// One file of a chain in which each extends the next.
struct Source {
  std::string text;
  std::string label;      ///< for messages
  std::string directory;  ///< that `extends` is relative to
};

bool is_file_name(const std::string& name);
/// Throws Error that names the file.
std::string read_file(const std::string& file);
/// The presets of "clusters", "devices" or "software".
std::vector<std::string> names_in(const std::string& folder);
/// Finds the source that a file calls `name`; messages begin with `where`.
Source find_source(const std::string& folder, const std::string& name,
                   const std::string& directory, const std::string& where);

/// Follows references from file to file; throws Error on a cycle.
class Chain {
 public:
  explicit Chain(bool files_allowed) : files_allowed_(files_allowed) {}

  /// Applies what `object` of the file `source` extends, if anything.
  template <typename Apply>
  void extend(const std::string& folder, JsonObject& object,
              const Source& source, const Apply& apply) {
    if (object.find("extends") == nullptr) return;
    std::string base;
    object.text("extends", base);
    follow(folder, base, source, object.where("extends") + ": ", apply);
  }

  /// Applies the source that `from` calls `name`.
  template <typename Apply>
  void follow(const std::string& folder, const std::string& name,
              const Source& from, const std::string& where,
              const Apply& apply) {
    const Source source = find(folder, name, from, where);
    labels_.push_back(from.label);
    apply(source);
    labels_.pop_back();
  }

 private:
  Source find(const std::string& folder, const std::string& name,
              const Source& from, const std::string& where) const;

  bool files_allowed_;
  std::vector<std::string> labels_;  ///< of the files that led here
};

/// The largest cluster.
constexpr int kMaxDevices = 1 << 20;

/// Applies the file that `source` extends, then `source` itself. Throws Error
/// that names the file, the path in it, the value and what is allowed. Does not
/// check whether the parts fit together.
void read_cluster(const Source& source, Chain& chain, Cluster& cluster);
void read_software(const Source& source, Chain& chain, Software& software);
/// Changes the device to what the cluster's software reaches on it.
void apply_software(Cluster& cluster);

}  // namespace shardbook::sim::internal
