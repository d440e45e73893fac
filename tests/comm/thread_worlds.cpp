#include "tests/comm/worlds.h"
#include "tests/support/on_ranks.h"

namespace shardbook::test {

std::vector<World> conformance_worlds() {
  World threads{"Threads", [](int world_size, const RankBody& body) {
                  return on_ranks(world_size, body);
                }};
  World rendezvous{"Rendezvous", [](int world_size, const RankBody& body) {
                     LaunchOptions options;
                     options.rendezvous_sends = true;
                     return on_ranks(world_size, body, options);
                   }};
  rendezvous.sizes = {2, 3};
  rendezvous.buffers_small_messages = false;
  return {threads, rendezvous};
}

}  // namespace shardbook::test
