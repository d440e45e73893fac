#pragma once

// How ranks find their coordinator.
//
//   tcp:HOST:PORT             rank 0 serves there, on that address only
//   file:FOLDER               rank 0 writes its address into a shared folder
//   redis:HOST:PORT[/JOB]     the same, in a Redis server (Gloo's store)

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/launch.h"
#include "comm/processes.h"
#include "comm/processes/coordinator.h"

namespace shardbook::internal {

/// What a rank needs to meet the others. Keep it for the life of the world.
struct Rendezvous {
  /// Serves the world; in rank 0 only, and not where the launcher does.
  std::unique_ptr<Coordinator> coordinator;
  /// Where the coordinator is, once that is known.
  std::function<std::optional<HostPort>()> locate;
  std::string coordinator_name = "rank 0";
  /// Removes what rank 0 has published.
  std::shared_ptr<void> publication;
};

/// Throws Error, a sentence about `subject`, when a rendezvous cannot be
/// understood.
void check_rendezvous(const std::string& subject, const std::string& text);

/// Throws Error when the address cannot be understood or served.
Rendezvous make_rendezvous(const RankEnvironment& environment,
                           std::uint64_t generation,
                           const LaunchOptions& options);

/// A place in a Redis server for one short text.
class RedisPlace {
 public:
  virtual ~RedisPlace() = default;
  /// Throws Error where the key is taken.
  virtual void set(const std::string& value) = 0;
  virtual std::optional<std::string> get() = 0;
};
/// Without Redis support in this build it throws Error.
std::unique_ptr<RedisPlace> make_redis_place(const HostPort& server,
                                             const std::string& key);

}  // namespace shardbook::internal
