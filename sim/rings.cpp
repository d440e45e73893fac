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

/// Most rounds that fit into the links, by trying each way round from device
/// 0, taking its links out, and going on with the rest.
class Search {
 public:
  Search(Links links, int size, int limit)
      : links_(std::move(links)), size_(size), limit_(limit) {}

  int run() {
    extend(0, {0}, std::vector<bool>(static_cast<std::size_t>(size_)));
    return best_;
  }

 private:
  int& left(int i, int j) { return links_[ordered(i, j)]; }

  void extend(int rounds, std::vector<int> round, std::vector<bool> visited) {
    // `limit_` rounds use up some device's links: nothing better exists.
    if (best_ == limit_ || ++steps_ > kMaxSteps) return;
    const int last = round.back();
    visited[static_cast<std::size_t>(last)] = true;
    if (static_cast<int>(round.size()) == size_) {
      // Each round is met in both directions; one of them is enough.
      if (left(last, 0) == 0 || round[1] > last) return;
      --left(last, 0);
      best_ = std::max(best_, rounds + 1);
      extend(rounds + 1, {0},
             std::vector<bool>(static_cast<std::size_t>(size_)));
      ++left(last, 0);
      return;
    }
    for (int next = 1; next < size_; ++next) {
      if (visited[static_cast<std::size_t>(next)] || left(last, next) == 0) {
        continue;
      }
      --left(last, next);
      round.push_back(next);
      extend(rounds, round, visited);
      round.pop_back();
      ++left(last, next);
    }
  }

  /// Beyond this the best so far stands: larger meshes than any that exists.
  static constexpr long kMaxSteps = 2'000'000;

  Links links_;
  int size_;
  int limit_;
  int best_ = 0;
  long steps_ = 0;
};

}  // namespace

int num_rings(const std::vector<MeshLink>& mesh,
              const std::vector<int>& devices) {
  const int size = static_cast<int>(devices.size());
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
  if (size < 2) return 0;
  const int least = *std::min_element(degree.begin(), degree.end());
  if (size == 2) return least;
  return 2 * Search(std::move(links), size, least / 2).run();
}

}  // namespace shardbook::sim
