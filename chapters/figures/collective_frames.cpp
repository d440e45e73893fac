// Prints the frames of collectives, recorded from four ranks, as JSON:
//
//   {"ring": [{"ranks": [[1, 16, 256, 4096], ...], "messages": [[0, 1, 3, 1], ...]},
//             ...], ...}
//
// Pieces are numbers of figures/pieces.h; a message is its ranks, its first piece
// and its number of pieces.

#include <iostream>
#include <nlohmann/json.hpp>

#include "chapters/figures/pieces.h"
#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"

namespace shardbook::figures {
namespace {

using Json = nlohmann::ordered_json;

void keep_only(const Tensor& tensor, std::int64_t place, const Tensor& piece) {
  tensor.copy_from(Tensor::zeros({kPieceRanks}, tensor.options()));
  tensor.flat_view(place, {1}).copy_from(piece);
}

Json recorded(const std::function<void(ProcessGroup& group,
                                       const Tensor& tensor)>& collective) {
  Json frames;
  for (const Frame& frame : frames_of(collective)) {
    Json messages = Json::array();
    for (const Message& each : frame.messages) {
      messages.push_back({each.from, each.to, each.first, each.count});
    }
    frames.push_back({{"ranks", frame.ranks}, {"messages", messages}});
  }
  return frames;
}

Json all() {
  using Group = ProcessGroup;
  Json result;
  result["ring"] = recorded([](Group& group, const Tensor& x) {
    algorithms::ring_all_reduce(group, x);
  });
  result["halving-doubling"] = recorded([](Group& group, const Tensor& x) {
    algorithms::halving_doubling_all_reduce(group, x);
  });
  result["tree"] = recorded([](Group& group, const Tensor& x) {
    algorithms::tree_reduce(group, x, 0);
    algorithms::tree_broadcast(group, x, 0);
  });
  result["reduce-scatter"] = recorded([](Group& group, const Tensor& x) {
    const Tensor sum = Tensor::empty({1}, x.options());
    algorithms::ring_reduce_scatter(group, sum, x);
    keep_only(x, group.rank(), sum);
  });
  result["all-gather"] = recorded([](Group& group, const Tensor& x) {
    const Tensor own = one_piece(group.rank(), group.rank());
    keep_only(x, group.rank(), own);
    algorithms::ring_all_gather(group, x, own);
  });
  result["all-to-all"] = recorded([](Group& group, const Tensor& x) {
    const Tensor received = Tensor::empty({kPieceRanks}, x.options());
    group.all_to_all(received, x).wait();
    x.copy_from(received);
  });
  return result;
}

}  // namespace
}  // namespace shardbook::figures

int main() { std::cout << shardbook::figures::all().dump() << "\n"; }
