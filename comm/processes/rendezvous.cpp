#include "comm/processes/rendezvous.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {
namespace {

namespace fs = std::filesystem;

// Text after `prefix`, if `text` begins with it.
std::optional<std::string> after(const std::string& text,
                                 const std::string& prefix) {
  if (text.rfind(prefix, 0) != 0) return {};
  return text.substr(prefix.size());
}

std::string address_text(const std::string& host, int port) {
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

// Rank 0 listens on the interface it is given, or for this host only.
std::string serving_host(const LaunchOptions& options) {
  return options.network_interface.empty()
             ? "127.0.0.1"
             : interface_host(options.network_interface);
}

void meet_by_file(Rendezvous& result, const fs::path& folder, bool serves,
                  std::uint64_t generation, const LaunchOptions& options) {
  const fs::path file =
      folder / ("shardbook-coordinator-" + std::to_string(generation));
  if (serves) {
    std::error_code ignored;
    fs::create_directories(folder, ignored);
    // Write under a temporary name first: no rank may read half an address.
    const fs::path temporary =
        file.string() + "." + std::to_string(getpid()) + ".tmp";
    std::ofstream out(temporary);
    out << address_text(serving_host(options), result.coordinator->port());
    out.close();
    std::error_code error;
    if (out) fs::rename(temporary, file, error);
    SB_CHECK(out && !error, "rendezvous: cannot write ", file.string(),
             "; give a folder that every rank may write and read");
    result.publication = std::shared_ptr<void>(nullptr, [file](void*) {
      std::error_code already_gone;
      fs::remove(file, already_gone);
    });
  }
  result.locate = [file]() -> std::optional<HostPort> {
    std::ifstream in(file);
    std::string text;
    if (!(in >> text)) return {};
    return parse_host_port(text);
  };
}

void meet_by_redis(Rendezvous& result, const std::string& address, bool serves,
                   std::uint64_t generation, const LaunchOptions& options) {
  const std::size_t slash = std::min(address.find('/'), address.size());
  const std::string job =
      slash < address.size() ? address.substr(slash + 1) : "job";
  const std::string key = "shardbook/" + job + "/" + std::to_string(generation);
  const std::shared_ptr<RedisPlace> place =
      make_redis_place(parse_host_port(address.substr(0, slash)), key);
  if (serves) {
    place->set(address_text(serving_host(options), result.coordinator->port()));
  }
  result.locate = [place]() -> std::optional<HostPort> {
    const auto text = place->get();
    if (!text) return {};
    return parse_host_port(*text);
  };
}

bool has_host_and_port(const std::string& text) {
  try {
    return parse_host_port(text).port > 0;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void check_rendezvous(const std::string& subject, const std::string& text) {
  const auto tcp = after(text, "tcp:");
  const auto file = after(text, "file:");
  const auto redis = after(text, "redis:");
  SB_CHECK((tcp && has_host_and_port(*tcp)) || (file && !file->empty()) ||
               (redis && has_host_and_port(redis->substr(0, redis->find('/')))),
           subject,
           ": give tcp:HOST:PORT, file:FOLDER or redis:HOST:PORT[/JOB]; a port "
           "is a number from 1 to 65535");
}

Rendezvous make_rendezvous(const RankEnvironment& environment,
                           std::uint64_t generation,
                           const LaunchOptions& options) {
  const std::string& text = environment.rendezvous;
  const auto tcp = after(text, "tcp:");
  const auto file = after(text, "file:");
  const auto redis = after(text, "redis:");
  check_rendezvous("rendezvous \"" + text + "\"", text);

  Rendezvous result;
  const bool serves =
      environment.rank == 0 && !environment.is_served_by_launcher;
  if (environment.is_served_by_launcher) {
    result.coordinator_name = "the launcher";
  }
  if (serves) {
    Coordinator::Options serving;
    serving.address =
        tcp ? parse_host_port(*tcp) : HostPort{serving_host(options), 0};
    serving.world_size = environment.world_size;
    serving.generation = generation;
    result.coordinator = std::make_unique<Coordinator>(std::move(serving));
  }
  if (tcp) {
    const HostPort address = parse_host_port(*tcp);
    result.locate = [address] { return std::optional<HostPort>(address); };
  } else if (file) {
    meet_by_file(result, *file, serves, generation, options);
  } else {
    meet_by_redis(result, *redis, serves, generation, options);
  }
  return result;
}

}  // namespace shardbook::internal
