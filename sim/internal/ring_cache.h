#pragma once

// Rings already searched for, by the devices of the group.

#include <map>
#include <mutex>
#include <vector>

namespace shardbook::sim {

class RingCache {
 public:
  /// The number for these devices, from `search` the first time.
  template <typename Search>
  int get(const std::vector<int>& devices, const Search& search) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = rings_.find(devices);
    if (found != rings_.end()) return found->second;
    return rings_[devices] = search();
  }

 private:
  std::mutex mutex_;
  std::map<std::vector<int>, int> rings_;
};

}  // namespace shardbook::sim
