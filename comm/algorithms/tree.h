#pragma once

// Tree collectives: few steps, for small messages and many ranks.
//
// Binomial tree: after step k, 2^(k+1) ranks have the vector, and each passes
// it on. Rank v (counted from the root) hangs below v without its lowest bit:
//
//        0
//      / | \.
//     4  2  1       0 sends to 4, then 2, then 1; 4 to 6, then 5; ...
//    / \ |
//   6  5 3
//   |
//   7
//
// A rank of a binary tree sends its whole vector to two children, so half of
// the ranks, the leaves, send nothing. The double binary tree uses two trees
// for one half of the vector each, and the leaves of one are the inner ranks of
// the other: full bandwidth at logarithmic latency. (Sanders, Speck and Träff
// 2009; NCCL's choice across nodes.)

#include "comm/algorithms/cost_card.h"
#include "comm/process_group.h"

namespace shardbook::algorithms {

/// tensor = the root's tensor. ceil(log2 P) steps; P-1 messages of n.
void tree_broadcast(ProcessGroup& group, const Tensor& tensor, int root);
CostCard tree_broadcast_cost(int num_ranks, std::int64_t n, int root = 0);

/// The root's tensor = op over the ranks' tensors; others keep theirs.
/// ceil(log2 P) steps; P-1 messages of n.
void tree_reduce(ProcessGroup& group, const Tensor& tensor, int root,
                 ReduceOp op = ReduceOp::kSum);
CostCard tree_reduce_cost(int num_ranks, std::int64_t n, int root = 0);

/// A rank's place in a tree; the root's parent is -1.
struct TreeNode {
  int parent = -1;
  std::vector<int> children;
};
/// The two trees over `num_ranks` ranks, by rank. No rank has children in both,
/// except rank 0 where the number of ranks is odd.
std::vector<TreeNode> first_tree(int num_ranks);
std::vector<TreeNode> second_tree(int num_ranks);
/// Edges from the root to the farthest rank.
int tree_depth(const std::vector<TreeNode>& tree);

/// tensor = op over the ranks' tensors, on every rank the same bits.
///
/// Each half of the vector travels up and down its tree in `num_chunks` chunks,
/// one behind the other: 2 (depth + num_chunks - 1) steps of n / (2 num_chunks)
/// elements. All ranks together send 2 (P-1) n, as in a ring.
void double_tree_all_reduce(ProcessGroup& group, const Tensor& tensor,
                            ReduceOp op = ReduceOp::kSum, int num_chunks = 4);
CostCard double_tree_all_reduce_cost(int num_ranks, std::int64_t n,
                                     int num_chunks = 4);

}  // namespace shardbook::algorithms
