#include "comm/algorithms/tree.h"

#include <algorithm>

#include "comm/algorithms/internal/messages.h"
#include "core/check.h"

namespace shardbook::algorithms {
namespace {

// The binomial tree, with ranks counted from the root.
struct Binomial {
  Binomial(int size, int root) : size(size), root(root) {}
  int from_root(int rank) const { return (rank - root + size) % size; }
  int rank_of(int v) const { return (v + root) % size; }

  int parent(int rank) const {
    const int v = from_root(rank);
    return v == 0 ? -1 : rank_of(v & (v - 1));
  }
  // Farthest first: the largest subtree has the longest way to go.
  std::vector<int> children(int rank) const {
    const int v = from_root(rank);
    const int lowest = v == 0 ? 1 << log2_ceil(size) : v & -v;
    std::vector<int> result;
    for (int bit = lowest / 2; bit > 0; bit /= 2) {
      if (v + bit < size) result.push_back(rank_of(v + bit));
    }
    return result;
  }

  int size, root;
};

}  // namespace

void tree_broadcast(ProcessGroup& group, const Tensor& tensor, int root) {
  const Binomial tree(group.size(), root);
  const int parent = tree.parent(group.rank());
  if (parent >= 0) group.recv(tensor, parent).wait();
  for (int child : tree.children(group.rank())) {
    group.send(tensor, child).wait();
  }
}

void tree_reduce(ProcessGroup& group, const Tensor& tensor, int root,
                 ReduceOp op) {
  const Binomial tree(group.size(), root);
  const int parent = tree.parent(group.rank());
  std::vector<int> children = tree.children(group.rank());
  // The reverse of a broadcast: the smallest subtree is ready first.
  std::reverse(children.begin(), children.end());
  Tensor sum = tensor;
  if (parent >= 0 && !children.empty()) {
    sum = room_like(tensor, tensor.numel());
    sum.copy_from(range(tensor, 0, tensor.numel()));
  }
  for (int child : children) {
    const Tensor incoming = room_like(tensor, tensor.numel());
    group.recv(incoming, child).wait();
    combine(sum, incoming, op);
  }
  if (parent >= 0) group.send(sum, parent).wait();
}

// --- Two trees ---------------------------------------------------------------

namespace {

// Numbers are 1..n here. A number with k zeros at its end is k levels above the
// leaves, so all odd numbers are leaves:
//
//         4
//       /   \.
//      2     6        (n = 7)
//     / \   / \.
//    1   3 5   7
void build(int begin, int end, int parent, std::vector<TreeNode>& tree) {
  if (begin > end) return;
  // The number in the range with the most zeros at its end.
  int top = begin;
  for (int step = 1;; step *= 2) {
    const int candidate = (begin + step - 1) / step * step;
    if (candidate > end) break;
    top = candidate;
  }
  tree[static_cast<std::size_t>(top)].parent = parent;
  if (parent >= 0) {
    tree[static_cast<std::size_t>(parent)].children.push_back(top);
  }
  build(begin, top - 1, top, tree);
  build(top + 1, end, top, tree);
}

// Gives number v of a tree over 0..P-1 to rank `rank_of(v)`.
template <typename RankOf>
std::vector<TreeNode> renumber(const std::vector<TreeNode>& tree,
                               RankOf rank_of) {
  std::vector<TreeNode> result(tree.size());
  for (std::size_t v = 0; v < tree.size(); ++v) {
    TreeNode& node = result[static_cast<std::size_t>(rank_of(v))];
    const TreeNode& old = tree[v];
    node.parent = old.parent < 0 ? -1 : rank_of(old.parent);
    for (int child : old.children) node.children.push_back(rank_of(child));
  }
  return result;
}

}  // namespace

std::vector<TreeNode> first_tree(int num_ranks) {
  // Rank 0 is number 0 and the root above the tree of 1..P-1: it has one child,
  // and counts as inner. Odd ranks are leaves.
  std::vector<TreeNode> tree(static_cast<std::size_t>(num_ranks));
  build(1, num_ranks - 1, 0, tree);
  return tree;
}

std::vector<TreeNode> second_tree(int num_ranks) {
  // The first tree mirrored: even ranks are the leaves. If the number of ranks
  // is odd, there is one more even rank than odd ones: the tree is shifted by
  // one instead, and all even ranks except 0 are leaves.
  const std::vector<TreeNode> tree = first_tree(num_ranks);
  if (num_ranks % 2 == 0) {
    return renumber(tree, [&](int v) { return num_ranks - 1 - v; });
  }
  return renumber(tree, [&](int v) { return (v + 1) % num_ranks; });
}

int tree_depth(const std::vector<TreeNode>& tree) {
  int depth = 0;
  for (std::size_t r = 0; r < tree.size(); ++r) {
    int edges = 0;
    for (int up = tree[r].parent; up >= 0;
         up = tree[static_cast<std::size_t>(up)].parent) {
      ++edges;
    }
    depth = std::max(depth, edges);
  }
  return depth;
}

void double_tree_all_reduce(ProcessGroup& group, const Tensor& tensor,
                            ReduceOp op, int num_chunks) {
  SB_CHECK(num_chunks >= 1, "double_tree_all_reduce: ", num_chunks,
           " chunks; give at least one");
  if (group.size() == 1) return;
  const auto me = static_cast<std::size_t>(group.rank());
  const TreeNode nodes[] = {first_tree(group.size())[me],
                            second_tree(group.size())[me]};
  const std::int64_t n = tensor.numel();

  // Chunk c of tree t. The trees take turns, so that both are always busy.
  const int num_pieces = 2 * num_chunks;
  const auto chunk = [&](int index) {
    return range(tensor, piece_begin(n, num_pieces, index),
                 piece_begin(n, num_pieces, index + 1));
  };
  std::vector<Work> sent;

  // Up: add what the children send, pass the sum on.
  const Tensor room = room_like(tensor, piece_size(n, num_pieces, 0));
  for (int i = 0; i < num_pieces; ++i) {
    const TreeNode& node = nodes[i % 2];
    const Tensor mine = chunk(i);
    for (int child : node.children) {
      const Tensor incoming = range(room, 0, mine.numel());
      group.recv(incoming, child).wait();
      combine(mine, incoming, op);
    }
    if (node.parent >= 0) sent.push_back(group.send(mine, node.parent));
  }
  // The sent data may be overwritten now.
  for (Work& work : sent) work.wait();
  sent.clear();

  // Down: the root's sum for everybody.
  for (int i = 0; i < num_pieces; ++i) {
    const TreeNode& node = nodes[i % 2];
    const Tensor mine = chunk(i);
    if (node.parent >= 0) group.recv(mine, node.parent).wait();
    for (int child : node.children) sent.push_back(group.send(mine, child));
  }
  for (Work& work : sent) work.wait();
}

// --- Cost --------------------------------------------------------------------

CostCard tree_broadcast_cost(int num_ranks, std::int64_t n, int root) {
  const Binomial tree(num_ranks, root);
  CostCard card{log2_ceil(num_ranks), 0, {}};
  card.chain_elements = card.steps * static_cast<double>(n);
  for (int r = 0; r < num_ranks; ++r) {
    card.elements_sent.push_back(static_cast<double>(tree.children(r).size()) *
                                 static_cast<double>(n));
  }
  return card;
}

CostCard tree_reduce_cost(int num_ranks, std::int64_t n, int root) {
  CostCard card{log2_ceil(num_ranks), 0, {}};
  card.chain_elements = card.steps * static_cast<double>(n);
  for (int r = 0; r < num_ranks; ++r) {
    card.elements_sent.push_back(r == root ? 0 : static_cast<double>(n));
  }
  return card;
}

CostCard double_tree_all_reduce_cost(int num_ranks, std::int64_t n,
                                     int num_chunks) {
  const std::vector<TreeNode> trees[] = {first_tree(num_ranks),
                                         second_tree(num_ranks)};
  const int depth = std::max(tree_depth(trees[0]), tree_depth(trees[1]));
  CostCard card;
  if (num_ranks > 1) {
    card.steps = 2 * (depth + num_chunks - 1);
    card.chain_elements =
        card.steps * static_cast<double>(n) / (2 * num_chunks);
  }
  // Up once, and down once per child, with the chunks of each tree.
  for (std::size_t r = 0; r < trees[0].size(); ++r) {
    double sent = 0;
    for (int i = 0; i < 2 * num_chunks; ++i) {
      const TreeNode& node = trees[i % 2][r];
      const auto messages = node.children.size() + (node.parent >= 0 ? 1 : 0);
      sent += static_cast<double>(messages) *
              static_cast<double>(piece_size(n, 2 * num_chunks, i));
    }
    card.elements_sent.push_back(sent);
  }
  return card;
}

}  // namespace shardbook::algorithms
