#include "sim/rings.h"

#include <algorithm>
#include <map>
#include <utility>

namespace shardbook::sim {

namespace {

/// Links left between positions i < j of the devices.
using Links = std::map<std::pair<int, int>, int>;

std::pair<int, int> ordered(int i, int j) {
  return i < j ? std::make_pair(i, j) : std::make_pair(j, i);
}

/// The most rounds that fit into the links: tries each round from device 0,
/// removes its links and searches the rest. Devices from `size` on are outside;
/// a round may pass through one between two devices.
class Search {
 public:
  Search(Links links, int size, int num_outside, int limit)
      : links_(std::move(links)),
        size_(size),
        num_outside_(num_outside),
        limit_(limit) {}

  int run() {
    extend(0, {0}, std::vector<bool>(static_cast<std::size_t>(size_)));
    return best_;
  }

 private:
  int& left(int i, int j) { return links_[ordered(i, j)]; }

  /// How to get from i to j: over their own link, or over a device outside.
  static constexpr int kDirect = -1, kNone = -2;
  int way(int i, int j) {
    if (left(i, j) > 0) return kDirect;
    for (int k = size_; k < size_ + num_outside_; ++k) {
      if (left(i, k) > 0 && left(k, j) > 0) return k;
    }
    return kNone;
  }
  /// Takes `count` of the links of this way.
  void take(int i, int j, int way, int count) {
    if (way == kDirect) {
      left(i, j) -= count;
    } else {
      left(i, way) -= count;
      left(way, j) -= count;
    }
  }

  void extend(int rounds, std::vector<int> round, std::vector<bool> visited) {
    // `limit_` rounds use up some device's links: nothing better exists.
    if (best_ == limit_ || ++steps_ > kMaxSteps) return;
    const int last = round.back();
    visited[static_cast<std::size_t>(last)] = true;
    if (static_cast<int>(round.size()) == size_) {
      // Each round is found in both directions; one of them is enough.
      const int home = way(last, 0);
      if (home == kNone || round[1] > last) return;
      take(last, 0, home, 1);
      best_ = std::max(best_, rounds + 1);
      extend(rounds + 1, {0},
             std::vector<bool>(static_cast<std::size_t>(size_)));
      take(last, 0, home, -1);
      return;
    }
    for (int next = 1; next < size_; ++next) {
      if (visited[static_cast<std::size_t>(next)]) continue;
      const int step = way(last, next);
      if (step == kNone) continue;
      take(last, next, step, 1);
      round.push_back(next);
      extend(rounds, round, visited);
      round.pop_back();
      take(last, next, step, -1);
    }
  }

  /// The search ends with the best so far; no mesh that exists needs more
  /// steps.
  static constexpr long kMaxSteps = 2'000'000;

  Links links_;
  int size_;
  int num_outside_;
  int limit_;
  int best_ = 0;
  long steps_ = 0;
};

/// Rounds through the first `size` of `devices`, with the help of the others.
int num_rounds(const std::vector<MeshLink>& mesh,
               const std::vector<int>& devices, int size) {
  Links links;
  std::vector<int> degree(devices.size());
  for (const MeshLink& link : mesh) {
    const auto a = std::find(devices.begin(), devices.end(), link.a);
    const auto b = std::find(devices.begin(), devices.end(), link.b);
    if (a == devices.end() || b == devices.end()) continue;
    const int i = static_cast<int>(a - devices.begin());
    const int j = static_cast<int>(b - devices.begin());
    links[ordered(i, j)] += link.count;
    degree[static_cast<std::size_t>(i)] += link.count;
    degree[static_cast<std::size_t>(j)] += link.count;
  }
  const int least = *std::min_element(degree.begin(), degree.begin() + size);
  if (size == 2) return least;
  const int num_outside = static_cast<int>(devices.size()) - size;
  return Search(std::move(links), size, num_outside, least / 2).run();
}

}  // namespace

int num_rings(const std::vector<MeshLink>& mesh,
              const std::vector<int>& devices) {
  const int size = static_cast<int>(devices.size());
  if (size < 2) return 0;
  const int direct = num_rounds(mesh, devices, size);
  if (size == 2) return direct;
  if (direct > 0) return 2 * direct;
  std::vector<int> all = devices;
  for (const MeshLink& link : mesh) {
    for (const int device : {link.a, link.b}) {
      if (std::find(all.begin(), all.end(), device) == all.end()) {
        all.push_back(device);
      }
    }
  }
  return 2 * num_rounds(mesh, all, size);
}

}  // namespace shardbook::sim
