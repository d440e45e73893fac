#include "comm/processes/rendezvous.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/internal/arguments.h"
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
  const RedisPlace place =
      make_redis_place(parse_host_port(address.substr(0, slash)), key);
  if (serves) {
    place.set(address_text(serving_host(options), result.coordinator->port()));
  }
  result.locate = [place]() -> std::optional<HostPort> {
    const auto text = place.get();
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

// One of three kinds of rendezvous, without its prefix.
struct Place {
  std::optional<std::string> tcp, file, redis;
};

Place read_place(const std::string& subject, const std::string& text) {
  Place place{after(text, "tcp:"), after(text, "file:"), after(text, "redis:")};
  const auto& [tcp, file, redis] = place;
  SB_CHECK((tcp && has_host_and_port(*tcp)) || (file && !file->empty()) ||
               (redis && has_host_and_port(redis->substr(0, redis->find('/')))),
           subject,
           ": give tcp:HOST:PORT, file:FOLDER or redis:HOST:PORT[/JOB]; a port "
           "is a number from 1 to 65535");
  return place;
}

}  // namespace

void check_rendezvous(const std::string& subject, const std::string& text) {
  read_place(subject, text);
}

Rendezvous make_rendezvous(const RankEnvironment& environment,
                           std::uint64_t generation,
                           const LaunchOptions& options) {
  const std::string& text = environment.rendezvous;
  const auto [tcp, file, redis] =
      read_place("rendezvous \"" + text + "\"", text);
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

// --- All ranks together

namespace {

// The options that must agree, as one text: names and values, each ended by a
// zero byte.
std::string agreement_text(const LaunchOptions& options) {
  std::string text;
  for (const auto& [name, value] : options.agreed) {
    text += name + '\0' + value + '\0';
  }
  return text;
}

std::map<std::string, std::string> read_agreement(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream in(text);
  std::string name, value;
  while (std::getline(in, name, '\0') && std::getline(in, value, '\0')) {
    values[name] = value;
  }
  return values;
}

// Every rank has all texts, so all of them throw the same.
void check_agreement(const std::vector<std::string>& texts) {
  std::vector<std::map<std::string, std::string>> ranks;
  for (const std::string& text : texts) ranks.push_back(read_agreement(text));
  const auto value_on = [&](std::size_t rank, const std::string& name) {
    const auto found = ranks[rank].find(name);
    return found == ranks[rank].end() ? "not known"
           : found->second.empty()    ? "not given"
                                      : found->second;
  };
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    for (const auto* side : {&ranks[0], &ranks[rank]}) {
      for (const auto& [name, value] : *side) {
        const std::string first = value_on(0, name);
        const std::string other = value_on(rank, name);
        if (first == other) continue;
        throw OptionsDiffer(fmt::format(
            "the ranks' options differ: {} is {} on rank 0 and {} on rank {}; "
            "start every rank with the same options",
            name, first, other, rank));
      }
    }
  }
}

}  // namespace

std::string joining_text(int world_size) {
  return "the rendezvous of " + std::to_string(world_size) + " ranks";
}

std::unique_ptr<ControlLine> join_world(const Rendezvous& rendezvous,
                                        const RankEnvironment& environment,
                                        std::uint64_t generation,
                                        const LaunchOptions& options) {
  auto line = std::make_unique<ControlLine>(
      ControlLine::Options{.locate = rendezvous.locate,
                           .coordinator_name = rendezvous.coordinator_name,
                           .rank = environment.rank,
                           .world_size = environment.world_size,
                           .generation = generation,
                           .timeout = options.timeout});
  const int size = environment.world_size;
  check_agreement(line->exchange("join", join_ranks(ranks_below(size)),
                                 joining_text(size), agreement_text(options),
                                 options.timeout));
  return line;
}

void wait_for_all(ControlLine& line, const std::string& key, int world_size,
                  std::chrono::milliseconds timeout) {
  line.exchange(key, join_ranks(ranks_below(world_size)),
                joining_text(world_size), "", timeout);
}

}  // namespace shardbook::internal
