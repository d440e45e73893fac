#include <algorithm>

#include "core/attention_block.h"

namespace shardbook {

double visible_pairs(const AttentionBlock& block) {
  const std::int64_t q = block.queries.size(), k = block.keys.size();
  if (!block.causal) return static_cast<double>(q) * static_cast<double>(k);
  // Query i sees min(k, i + shift + 1) keys, from the first that sees any on
  const std::int64_t first = std::clamp<std::int64_t>(-block.shift, 0, q);
  const std::int64_t full =
      std::clamp<std::int64_t>(k - 1 - block.shift, first, q);
  const auto rising = static_cast<double>(full - first);
  const auto start = static_cast<double>(first + block.shift + 1);
  return rising * start + rising * (rising - 1) / 2 +
         static_cast<double>(q - full) * static_cast<double>(k);
}

}  // namespace shardbook
