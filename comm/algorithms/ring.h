#pragma once

// Ring collectives: every rank talks to its two neighbours only, and all links
// are busy all the time.
//
// The vector is cut into P pieces. In each step a rank passes one piece to the
// right and receives one from the left. After P-1 steps of adding, each piece
// has been everywhere once and is complete on one rank; P-1 steps of copying
// carry it everywhere:
//
//   P = 3        rank 0      rank 1      rank 2
//   at first     a0 b0 c0    a1 b1 c1    a2 b2 c2
//   step 1       c0 ->       a1 ->       b2 ->         (to the right)
//                b0+b2       c1+c0       a2+a1
//   step 2       b02 ->      c01 ->      a12 ->
//                a           b           c             (complete)
//
// Bandwidth-optimal: no all-reduce sends less than 2 (P-1)/P n per rank.
// Latency grows with P. (Patarasuk and Yuan 2009; NCCL's choice for large
// messages within a node.)

#include "comm/algorithms/cost_card.h"
#include "comm/process_group.h"

namespace shardbook::algorithms {

/// tensor = op over the ranks' tensors, on every rank the same bits.
/// Sends 2 (P-1)/P n in 2 (P-1) steps; any n.
void ring_all_reduce(ProcessGroup& group, const Tensor& tensor,
                     ReduceOp op = ReduceOp::kSum);
CostCard ring_all_reduce_cost(int num_ranks, std::int64_t n);

/// output [n/P] = piece `rank` of the sum of the inputs [n], which do not
/// change. Sends (P-1)/P n in P-1 steps.
void ring_reduce_scatter(ProcessGroup& group, const Tensor& output,
                         const Tensor& input, ReduceOp op = ReduceOp::kSum);

/// output [n] = the inputs [n/P] end to end. Sends (P-1)/P n in P-1 steps.
void ring_all_gather(ProcessGroup& group, const Tensor& output,
                     const Tensor& input);

}  // namespace shardbook::algorithms
