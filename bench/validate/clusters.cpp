#include "bench/validate/clusters.h"

#include <map>

namespace shardbook::validate {
namespace {

std::map<std::string, std::string>& replaced() {
  static std::map<std::string, std::string> files;
  return files;
}

}  // namespace

void replace_cluster(const std::string& name, const std::string& file) {
  replaced()[name] = file;
}

std::string cluster_file(const std::string& name) {
  const auto found = replaced().find(name);
  return found == replaced().end() ? name : found->second;
}

sim::Cluster cluster_named(const std::string& name) {
  return sim::Cluster::read(cluster_file(name));
}

}  // namespace shardbook::validate
