#include "comm/launch.h"
#include "tests/comm/worlds.h"

namespace shardbook::test {

std::vector<World> conformance_worlds() {
  const auto run = [](int world_size, const RankBody& body) {
    std::vector<std::string> results(static_cast<std::size_t>(world_size));
    run_ranks(world_size, [&](ProcessGroup& world) {
      results[static_cast<std::size_t>(world.rank())] = body(world);
    });
    return results;
  };
  return {{"Threads", run}};
}

}  // namespace shardbook::test
