#pragma once

// Ranks that live inside a cell: threads of the notebook's process.
//
//   namespace lesson {                              // a cell of functions
//   double sum_of_ranks(ProcessGroup& world) {
//     Tensor x = Tensor::full({1}, world.rank());
//     world.all_reduce(x).wait();
//     return x.item();
//   }
//   }
//   on_ranks(4, lesson::sum_of_ranks);              // {6, 6, 6, 6}
//
// Every rank has ended when on_ranks returns, so a cell leaves no thread
// behind. Functions for ranks return their results, and the cell prints them:
// text that ranks print would come in any order.
//
// Only templates are defined here. Threads are started in the library: code
// that an interpreter compiles has no state of its own.

#include <cstddef>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/process_group.h"

namespace shardbook::notebook {

/// Calls `body` on each of `world_size` ranks. Throws Error "rank 2: ..." with
/// the reason of the first rank that failed, after all have ended.
void run_on_ranks(int world_size,
                  const std::function<void(ProcessGroup& world)>& body);

/// The results of body(world, more...) in the order of the ranks. They may
/// hold tensors, which stay on the device of their rank.
template <typename Body, typename... More>
auto on_ranks(int world_size, const Body& body, const More&... more) {
  using Result = decltype(body(std::declval<ProcessGroup&>(), more...));
  if constexpr (std::is_void_v<Result>) {
    run_on_ranks(world_size,
                 [&](ProcessGroup& world) { body(world, more...); });
  } else {
    static_assert(!std::is_same_v<Result, bool>,
                  "ranks write bits of one vector<bool>: return an int");
    std::vector<Result> results(static_cast<std::size_t>(world_size));
    run_on_ranks(world_size, [&](ProcessGroup& world) {
      results[static_cast<std::size_t>(world.rank())] = body(world, more...);
    });
    return results;
  }
}

}  // namespace shardbook::notebook
