#pragma once

// Recursive halving and doubling: as few bytes as a ring in logarithmic time.
//
// In each step a rank swaps with the partner whose number differs in one bit.
// Halving: it sends the half of its range that the partner will keep and adds
// what it receives to its own half. After log2 P steps each rank holds n/P
// complete sums. Doubling runs the same steps backwards and copies.
//
//   P = 4      rank 0     rank 1     rank 2     rank 3
//   bit 1      keeps 01   keeps 01   keeps 23   keeps 23     (of 4 pieces)
//   bit 0      keeps 0    keeps 1    keeps 2    keeps 3
//
// Where P is no power of two, the first P - 2^k pairs fold: one partner gives
// its whole vector to the other, waits, and is sent the result. (Thakur,
// Rabenseifner and Gropp 2005.)

#include "comm/algorithms/cost_card.h"
#include "comm/process_group.h"

namespace shardbook::algorithms {

/// tensor = op over the ranks' tensors, on every rank the same bits.
/// P = 2^k: sends 2 (P-1)/P n in 2 k steps. Otherwise two steps and 2 n more
/// on the longest chain.
void halving_doubling_all_reduce(ProcessGroup& group, const Tensor& tensor,
                                 ReduceOp op = ReduceOp::kSum);
/// Exact in elements where 2^k divides n.
CostCard halving_doubling_all_reduce_cost(int num_ranks, std::int64_t n);

}  // namespace shardbook::algorithms
