// The Redis rendezvous, on Gloo's store.

#include <gloo/rendezvous/redis_store.h>

#include "comm/processes/rendezvous.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

class GlooRedisPlace : public RedisPlace {
 public:
  GlooRedisPlace(const HostPort& server, std::string key)
      : store_(server.host, server.port), key_(std::move(key)) {}

  void set(const std::string& value) override {
    SB_CHECK(!get(), "rendezvous: the key \"", key_,
             "\" is taken by an earlier job; give every job a name of its "
             "own, redis:HOST:PORT/JOB");
    store_.set(key_, {value.begin(), value.end()});
  }

  std::optional<std::string> get() override {
    if (!store_.check({key_})) return {};
    const std::vector<char> value = store_.get(key_);
    return std::string(value.begin(), value.end());
  }

 private:
  ::gloo::rendezvous::RedisStore store_;
  std::string key_;
};

}  // namespace

std::unique_ptr<RedisPlace> make_redis_place(const HostPort& server,
                                             const std::string& key) {
  try {
    return std::make_unique<GlooRedisPlace>(server, key);
  } catch (const std::exception& error) {
    SB_FAIL("rendezvous: no Redis server at ", server.host, ":", server.port,
            ": ", error.what());
  }
}

}  // namespace shardbook::internal
