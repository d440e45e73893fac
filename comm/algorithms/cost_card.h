#pragma once

// The cost of a collective algorithm, computed before it runs.
//
// The latency-bandwidth model: a message of b bytes takes alpha + b / beta
// seconds. An algorithm takes as long as its longest chain of messages that
// wait for each other; links are independent and full-duplex.

#include <cstdint>
#include <vector>

namespace shardbook::algorithms {

struct CostCard {
  /// Messages in the longest chain.
  int steps = 0;
  /// Elements in the messages of that chain.
  double chain_elements = 0;
  /// Elements that each rank sends, by rank, as the ledger counts them.
  std::vector<double> elements_sent;

  double max_elements_sent() const;
  /// steps * alpha + bytes of the chain / beta.
  double seconds(double latency_s, double bytes_per_s,
                 double element_bytes) const;
};

/// Smallest k with 2^k >= n.
int log2_ceil(int n);
/// Largest k with 2^k <= n.
int log2_floor(int n);

/// Start of piece `index` of `n` elements cut into `pieces` pieces; the first n
/// % pieces of them are one element longer.
std::int64_t piece_begin(std::int64_t n, int pieces, int index);
inline std::int64_t piece_size(std::int64_t n, int pieces, int index) {
  return piece_begin(n, pieces, index + 1) - piece_begin(n, pieces, index);
}

}  // namespace shardbook::algorithms
