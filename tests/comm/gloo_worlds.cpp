// The worlds of gloo_test: ranks are forked processes.

#include "comm/processes.h"
#include "tests/comm/worlds.h"

namespace shardbook::test {

std::vector<World> conformance_worlds() {
  return {{"Gloo", [](int world_size, const RankBody& body) {
             return run_processes(world_size, body);
           }}};
}

}  // namespace shardbook::test
