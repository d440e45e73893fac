// The Redis rendezvous, on Gloo's store.

#include <gloo/rendezvous/redis_store.h>

#include "comm/processes/rendezvous.h"
#include "core/check.h"

namespace shardbook::internal {

RedisPlace make_redis_place(const HostPort& server, const std::string& key) {
  using Store = ::gloo::rendezvous::RedisStore;
  std::shared_ptr<Store> store;
  try {
    store = std::make_shared<Store>(server.host, server.port);
  } catch (const std::exception& error) {
    SB_FAIL("rendezvous: no Redis server at ", server.host, ":", server.port,
            ": ", error.what());
  }
  const auto set = [store, key](const std::string& value) {
    SB_CHECK(!store->check({key}), "rendezvous: the key \"", key,
             "\" is taken by an earlier job; give every job a name of its "
             "own, redis:HOST:PORT/JOB");
    store->set(key, {value.begin(), value.end()});
  };
  const auto get = [store, key]() -> std::optional<std::string> {
    if (!store->check({key})) return {};
    const std::vector<char> value = store->get(key);
    return std::string(value.begin(), value.end());
  };
  return {set, get};
}

}  // namespace shardbook::internal
