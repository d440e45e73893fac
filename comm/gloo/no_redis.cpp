#include "comm/processes/rendezvous.h"
#include "core/check.h"

namespace shardbook::internal {

RedisPlace make_redis_place(const HostPort&, const std::string&) {
  SB_FAIL(
      "rendezvous redis: this build has no hiredis; install libhiredis-dev and "
      "build again, or use tcp:HOST:PORT or file:FOLDER");
}

}  // namespace shardbook::internal
