#include "comm/algorithms/ring.h"

#include "comm/algorithms/internal/messages.h"
#include "core/check.h"

namespace shardbook::algorithms {
namespace {

// Neighbours and pieces, counted around the ring.
struct Ring {
  explicit Ring(const ProcessGroup& group)
      : size(group.size()),
        rank(group.rank()),
        left(wrap(rank - 1)),
        right(wrap(rank + 1)) {}
  int wrap(int index) const { return (index + 2 * size) % size; }
  Tensor piece(const Tensor& whole, int index) const {
    const std::int64_t n = whole.numel();
    return range(whole, piece_begin(n, size, wrap(index)),
                 piece_begin(n, size, wrap(index) + 1));
  }

  int size, rank, left, right;
};

void check_pieces(const char* name, const Tensor& whole, const Tensor& piece,
                  int size) {
  SB_CHECK(whole.numel() == piece.numel() * size, name, ": ", whole.numel(),
           " elements are not ", size, " pieces of ", piece.numel());
}

// Passes complete pieces on, beginning with this rank's own.
void pass_pieces(ProcessGroup& group, const Ring& ring, const Tensor& whole) {
  for (int step = 0; step < ring.size - 1; ++step) {
    swap_messages(group, ring.piece(whole, ring.rank - step), ring.right,
                  ring.piece(whole, ring.rank - step - 1), ring.left);
  }
}

}  // namespace

void ring_all_reduce(ProcessGroup& group, const Tensor& tensor, ReduceOp op) {
  const Ring ring(group);
  if (ring.size == 1) return;
  const Tensor room =
      room_like(tensor, piece_size(tensor.numel(), ring.size, 0));
  // Add: the last piece that arrives is this rank's own, complete.
  for (int step = 0; step < ring.size - 1; ++step) {
    const Tensor mine = ring.piece(tensor, ring.rank - step - 2);
    const Tensor incoming = range(room, 0, mine.numel());
    swap_messages(group, ring.piece(tensor, ring.rank - step - 1), ring.right,
                  incoming, ring.left);
    combine(mine, incoming, op);
  }
  pass_pieces(group, ring, tensor);
}

void ring_reduce_scatter(ProcessGroup& group, const Tensor& output,
                         const Tensor& input, ReduceOp op) {
  const Ring ring(group);
  check_pieces("ring_reduce_scatter", input, output, ring.size);
  if (ring.size == 1) return output.copy_from(input);
  // Each sum arrives from the left, gains this rank's piece and goes to the
  // right.
  Tensor outgoing = ring.piece(input, ring.rank - 1);
  for (int step = 0; step < ring.size - 1; ++step) {
    const Tensor incoming = room_like(output, output.numel());
    swap_messages(group, outgoing, ring.right, incoming, ring.left);
    combine(incoming, ring.piece(input, ring.rank - step - 2), op);
    outgoing = incoming;
  }
  range(output, 0, output.numel()).copy_from(outgoing);
}

void ring_all_gather(ProcessGroup& group, const Tensor& output,
                     const Tensor& input) {
  const Ring ring(group);
  check_pieces("ring_all_gather", output, input, ring.size);
  const Tensor own = ring.piece(output, ring.rank);
  if (own.raw() != input.raw()) own.copy_from(range(input, 0, input.numel()));
  pass_pieces(group, ring, output);
}

// --- Cost --------------------------------------------------------------------

CostCard ring_all_reduce_cost(int num_ranks, std::int64_t n) {
  const auto piece = [&](int index) {
    return piece_size(n, num_ranks, index % num_ranks);
  };
  CostCard card;
  card.steps = 2 * (num_ranks - 1);
  // The largest piece leads the chain of every step.
  card.chain_elements = static_cast<double>(card.steps * piece(0));
  // When it adds, a rank sends all pieces except its own; when it copies, all
  // except its right neighbour's.
  for (int r = 0; r < num_ranks; ++r) {
    card.elements_sent.push_back(
        static_cast<double>(2 * n - piece(r) - piece(r + 1)));
  }
  return card;
}

}  // namespace shardbook::algorithms
