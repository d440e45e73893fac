#include "comm/processes/joining.h"

#include <cstddef>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/processes/control_fields.h"

namespace shardbook::internal {
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
        throw OptionsDiffer("the ranks' options differ: " + name + " is " +
                            first + " on rank 0 and " + other + " on rank " +
                            std::to_string(rank) +
                            "; start every rank with the same options");
      }
    }
  }
}

std::string everybody(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return join_ranks(ranks);
}

}  // namespace

std::string joining_text(int world_size) {
  return "the rendezvous of " + std::to_string(world_size) + " ranks";
}

std::unique_ptr<ControlLine> join_world(const Rendezvous& rendezvous,
                                        const RankEnvironment& environment,
                                        std::uint64_t generation,
                                        const LaunchOptions& options) {
  ControlLine::Options settings;
  settings.locate = rendezvous.locate;
  settings.coordinator_name = rendezvous.coordinator_name;
  settings.rank = environment.rank;
  settings.world_size = environment.world_size;
  settings.generation = generation;
  settings.timeout = options.timeout;
  auto line = std::make_unique<ControlLine>(std::move(settings));
  const int size = environment.world_size;
  check_agreement(line->exchange("join", everybody(size), joining_text(size),
                                 agreement_text(options), options.timeout));
  return line;
}

void wait_for_all(ControlLine& line, const std::string& key, int world_size,
                  std::chrono::milliseconds timeout) {
  line.exchange(key, everybody(world_size), joining_text(world_size), "",
                timeout);
}

}  // namespace shardbook::internal
