#include "comm/algorithms/halving_doubling.h"

#include "comm/algorithms/internal/messages.h"

namespace shardbook::algorithms {
namespace {

// Pairs (0, 1), (2, 3), ... below 2 * num_folded become their odd member; the
// active ranks are numbered 0 to 2^k - 1 without gaps.
struct Folding {
  explicit Folding(int num_ranks)
      : num_active(1 << log2_floor(num_ranks)),
        num_folded(num_ranks - num_active) {}
  bool is_folded(int rank) const { return rank < 2 * num_folded; }
  bool gives(int rank) const { return is_folded(rank) && rank % 2 == 0; }
  int active_number(int rank) const {
    return is_folded(rank) ? rank / 2 : rank - num_folded;
  }
  int rank_of(int active) const {
    return active < num_folded ? 2 * active + 1 : active + num_folded;
  }

  int num_active, num_folded;
};

struct Range {
  std::int64_t begin, end;
  // The lower or the upper half.
  Range half(bool upper) const {
    const std::int64_t middle = begin + (end - begin) / 2;
    return upper ? Range{middle, end} : Range{begin, middle};
  }
};

Tensor part(const Tensor& tensor, const Range& r) {
  return range(tensor, r.begin, r.end);
}

void halve_and_double(ProcessGroup& group, const Folding& folding,
                      const Tensor& tensor, ReduceOp op) {
  const int me = folding.active_number(group.rank());
  const Tensor room = room_like(tensor, (tensor.numel() + 1) / 2);

  // Halve: far partners first, so that the range of a rank is contiguous.
  std::vector<Range> ranges{{0, tensor.numel()}};
  for (int bit = folding.num_active / 2; bit > 0; bit /= 2) {
    const int partner = folding.rank_of(me ^ bit);
    const bool upper = (me & bit) != 0;
    const Range keep = ranges.back().half(upper);
    const Range give = ranges.back().half(!upper);
    const Tensor incoming = range(room, 0, keep.end - keep.begin);
    swap_messages(group, part(tensor, give), partner, incoming, partner);
    combine(part(tensor, keep), incoming, op);
    ranges.push_back(keep);
  }

  // Double: the same steps backwards; the kept part is complete now.
  for (int bit = 1; bit < folding.num_active; bit *= 2) {
    const int partner = folding.rank_of(me ^ bit);
    const bool upper = (me & bit) != 0;
    const Range mine = ranges.back();
    ranges.pop_back();
    const Range theirs = ranges.back().half(!upper);
    swap_messages(group, part(tensor, mine), partner, part(tensor, theirs),
                  partner);
  }
}

}  // namespace

void halving_doubling_all_reduce(ProcessGroup& group, const Tensor& tensor,
                                 ReduceOp op) {
  const int rank = group.rank();
  if (group.size() == 1) return;
  const Folding folding(group.size());

  // Fold: the even partner sends its vector and waits for the result.
  if (folding.gives(rank)) {
    group.send(tensor, rank + 1).wait();
    group.recv(tensor, rank + 1).wait();
    return;
  }
  if (folding.is_folded(rank)) {
    const Tensor incoming = room_like(tensor, tensor.numel());
    group.recv(incoming, rank - 1).wait();
    combine(tensor, incoming, op);
  }
  halve_and_double(group, folding, tensor, op);
  if (folding.is_folded(rank)) group.send(tensor, rank - 1).wait();
}

CostCard halving_doubling_all_reduce_cost(int num_ranks, std::int64_t n) {
  const Folding folding(num_ranks);
  const double whole = static_cast<double>(n);
  const double swapped =
      2 * whole * (folding.num_active - 1) / folding.num_active;
  const bool folds = folding.num_folded > 0;
  CostCard card;
  card.steps = 2 * log2_floor(num_ranks) + (folds ? 2 : 0);
  card.chain_elements = swapped + (folds ? 2 * whole : 0);
  for (int r = 0; r < num_ranks; ++r) {
    double sent = folding.gives(r) ? 0 : swapped;
    // Its vector before the swaps, or the result after them.
    if (folding.is_folded(r)) sent += whole;
    card.elements_sent.push_back(sent);
  }
  return card;
}

}  // namespace shardbook::algorithms
