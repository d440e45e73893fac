#include "comm/processes/rendezvous.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/internal/arguments.h"
#include "comm/processes/job.h"
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

// A job that meets at the same port needs it until all of its ranks have come.
constexpr std::chrono::milliseconds kPortPatience{10000};

// Where rank 0 listens. `named`: the address of a rendezvous by TCP.
HostPort serving_address(const std::optional<HostPort>& named,
                         const RankEnvironment& environment,
                         const LaunchOptions& options) {
  const std::string& network = options.network_interface;
  const int port = named ? named->port : 0;
  if (environment.is_on_one_host && named) return *named;
  // Data and rendezvous may have a network each; "localhost" names neither.
  if (!network.empty() && named && !is_name_of_loopback(named->host)) {
    return *named;
  }
  if (!network.empty()) return {interface_host(network), port};
  return {environment.is_on_one_host ? "127.0.0.1" : kAllAddresses, port};
}

std::string random_text() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

// What rank 0 publishes, a line each: the serial number, then the addresses.
std::string text_of(const ServingPlace& place) {
  std::string text = place.serial + "\n";
  for (const HostPort& address : place.addresses) {
    text += host_port_text(address) + "\n";
  }
  return text;
}

ServingPlace read_published(std::istream& in) {
  ServingPlace place;
  std::getline(in, place.serial);
  for (std::string line; std::getline(in, line);) {
    place.addresses.push_back(parse_host_port(line));
  }
  return place;
}

// `served`: in rank 0, where it serves.
void meet_by_file(Rendezvous& result, const fs::path& folder,
                  const std::string& name,
                  const std::optional<ServingPlace>& served) {
  const fs::path file = folder / ("shardbook-coordinator-" + name);
  const auto locate = [file] {
    std::ifstream in(file);
    return read_published(in);
  };
  result.locate = locate;
  if (!served) return;
  std::error_code ignored;
  fs::create_directories(folder, ignored);
  // Write under a temporary name first: no rank may read half an address.
  const fs::path temporary =
      file.string() + "." + std::to_string(getpid()) + ".tmp";
  std::ofstream out(temporary);
  out << text_of(*served);
  out.close();
  std::error_code error;
  if (out) fs::rename(temporary, file, error);
  SB_CHECK(out && !error, "rendezvous: cannot write ", file.string(),
           "; give a folder that every rank may write and read");
  const auto remove = [file, locate, serial = served->serial](void*) {
    // A run that began later in the same folder has written its own.
    if (locate().serial != serial) return;
    std::error_code already_gone;
    fs::remove(file, already_gone);
  };
  result.publication = std::shared_ptr<void>(nullptr, remove);
}

void meet_by_redis(Rendezvous& result, const std::string& address,
                   std::uint64_t generation,
                   const std::optional<ServingPlace>& served) {
  const std::size_t slash = std::min(address.find('/'), address.size());
  const std::string job =
      slash < address.size() ? address.substr(slash + 1) : "job";
  const std::string key = "shardbook/" + job + "/" + std::to_string(generation);
  const RedisPlace place =
      make_redis_place(parse_host_port(address.substr(0, slash)), key);
  if (served) place.set(text_of(*served));
  result.locate = [place] {
    std::istringstream in(place.get().value_or(""));
    return read_published(in);
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
  const Place place = read_place("rendezvous \"" + text + "\"", text);
  std::optional<HostPort> named;
  if (place.tcp) named = parse_host_port(*place.tcp);
  Rendezvous result;
  std::optional<ServingPlace> served;
  if (environment.is_served_by_launcher) {
    result.coordinator_name = "the launcher";
  } else if (environment.rank == 0) {
    const HostPort address = serving_address(named, environment, options);
    const std::string serial = named ? "" : random_text();
    result.coordinator = std::make_unique<Coordinator>(Coordinator::Options{
        .listener =
            listen_on(address, std::min(options.timeout, kPortPatience)),
        .world_size = environment.world_size,
        .job = environment.job,
        .serial = serial,
        .generation = generation});
    served = ServingPlace{{}, serial};
    for (const std::string& host : address.host == kAllAddresses
                                       ? host_addresses()
                                       : std::vector{address.host}) {
      served->addresses.push_back({host, result.coordinator->address().port});
    }
  }
  if (place.file) {
    // Jobs that have names may share a folder.
    const std::string& job = environment.job;
    const std::string prefix =
        job.empty() ? "" : fmt::format("{:08x}-", job_number(job));
    meet_by_file(result, *place.file, prefix + std::to_string(generation),
                 served);
  } else if (place.redis) {
    meet_by_redis(result, *place.redis, generation, served);
  } else {
    result.locate = [address = *named] { return ServingPlace{{address}, ""}; };
  }
  // Its own name on the network may not lead rank 0 to itself.
  if (served) {
    served->addresses = {result.coordinator->address()};
    result.locate = [served = *served] { return served; };
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
                           .job = environment.job,
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
