// The conformance suite with ranks as fibers, and with clocks on ranks.

#include "sim/fiber_world.h"
#include "tests/comm/worlds.h"
#include "tests/sim/sim_support.h"
#include "tests/support/on_ranks.h"

namespace shardbook::test {
namespace {

using Start =
    std::function<void(int, const std::function<void(ProcessGroup&)>&)>;

World world(const std::string& name, const Start& start) {
  return {name, [start](int world_size, const RankBody& body) {
            return by_rank(world_size, start, body);
          }};
}

}  // namespace

std::vector<World> conformance_worlds() {
  sim::Cluster large = plain_cluster();
  large.num_nodes = 16;
  return {world("Fibers",
                [](int size, const auto& body) {
                  sim::run_fibers(size, body, {}, /*on_meta=*/false);
                }),
          world("EmulatedThreads", [large](int size, const auto& body) {
            sim::run_world(size, body, plain_world("threads", large));
          })};
}

}  // namespace shardbook::test
