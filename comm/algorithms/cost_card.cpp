#include "comm/algorithms/cost_card.h"

#include <algorithm>

namespace shardbook::algorithms {

double CostCard::max_elements_sent() const {
  return elements_sent.empty()
             ? 0
             : *std::max_element(elements_sent.begin(), elements_sent.end());
}

double CostCard::seconds(double latency_s, double bytes_per_s,
                         double element_bytes) const {
  return steps * latency_s + chain_elements * element_bytes / bytes_per_s;
}

int log2_ceil(int n) {
  int k = 0;
  while ((1LL << k) < n) ++k;
  return k;
}

int log2_floor(int n) {
  int k = 0;
  while ((2LL << k) <= n) ++k;
  return k;
}

std::int64_t piece_begin(std::int64_t n, int pieces, int index) {
  const std::int64_t small = n / pieces;
  const std::int64_t larger = n % pieces;
  return index * small + std::min<std::int64_t>(index, larger);
}

}  // namespace shardbook::algorithms
