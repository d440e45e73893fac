#include "tests/comm/worlds.h"
#include "tests/support/on_ranks.h"

namespace shardbook::test {

std::vector<World> conformance_worlds() {
  return {{"Threads", [](int world_size, const RankBody& body) {
             return on_ranks(world_size, body);
           }}};
}

}  // namespace shardbook::test
