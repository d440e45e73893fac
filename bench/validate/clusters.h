#pragma once

// The clusters that predictors name. A file may stand for a preset, so that its
// constants can be fitted without building anything (fit_h100.py).

#include <string>

#include "sim/cluster.h"

namespace shardbook::validate {

/// From now on, `file` stands for the preset `name`. Call it before predicting.
void replace_cluster(const std::string& name, const std::string& file);
/// The file that stands for a preset, or its name.
std::string cluster_file(const std::string& name);
sim::Cluster cluster_named(const std::string& name);

}  // namespace shardbook::validate
