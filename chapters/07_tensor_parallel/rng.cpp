#include "chapters/07_tensor_parallel/rng.h"

#include <utility>

#include "core/check.h"

namespace shardbook::tensor_parallel {

StreamSeeds megatron_seeds(std::uint64_t seed, const RngPlace& place) {
  const auto offset = [](int value) {
    return static_cast<std::uint64_t>(value);
  };
  StreamSeeds seeds;
  std::uint64_t& base = seeds.default_stream;
  base = seed + 100 * offset(place.pp);
  if (place.replicas_differ) base += 10 * offset(place.dp);
  seeds.tensor = base + 2718 + offset(place.tp);
  seeds.expert = base + 1024 + 100 * offset(place.ep) + offset(place.expert_tp);
  return seeds;
}

void RngTracker::add(const std::string& name, std::uint64_t seed) {
  for (const auto& [other, state] : streams_) {
    SB_CHECK(other != name, "random stream '", name, "' exists already");
    SB_CHECK(state.seed != seed, "random stream '", name, "': seed ", seed,
             " is that of '", other, "'; give one that no stream has");
  }
  RandomState begin;
  begin.seed = seed;
  streams_[name] = begin;
}

RandomState& RngTracker::stream(const std::string& name) {
  SB_CHECK(!is_forked_, "random stream '", name,
           "': a fork inside of another one; end that first");
  const auto found = streams_.find(name);
  SB_CHECK(found != streams_.end(), "random stream '", name,
           "' does not exist; add it first");
  return found->second;
}

RngTracker::Fork::Fork(RngTracker& tracker, const std::string& name)
    : tracker_(tracker), stream_(tracker.stream(name)) {
  std::swap(RankContext::current().random, stream_);
  tracker_.is_forked_ = true;
}

RngTracker::Fork::~Fork() {
  std::swap(RankContext::current().random, stream_);
  tracker_.is_forked_ = false;
}

RngTracker::States RngTracker::states() const {
  SB_CHECK(!is_forked_, "random streams: positions are read outside of forks");
  return {RankContext::current().random, streams_};
}

void RngTracker::set_states(const States& states) {
  SB_CHECK(!is_forked_, "random streams: positions are set outside of forks");
  RankContext::current().random = states.default_stream;
  streams_ = states.others;
}

}  // namespace shardbook::tensor_parallel
