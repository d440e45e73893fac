#pragma once

// The random streams of Megatron-LM: masks that must agree between ranks, and
// masks that must differ, are drawn from different streams.
//
//   stream    seed                              draws dropout on
//   default   base                              activations that every rank has
//   tensor    base + 2718 + tp                  activations cut over tp
//   expert    base + 1024 + 100 ep + expert tp  activations inside experts
//
// base = seed + 100 pp, plus 10 dp if replicas are to draw different masks; by
// default they draw the same. The default stream is the context's RandomState,
// and a tracker keeps the others.
//
// A stream has only a position, not the whole tensor's indices, so masks differ
// from one device's. Megatron-LM: core/tensor_parallel/random.py.

#include <cstdint>
#include <map>
#include <string>

#include "core/context.h"

namespace shardbook::tensor_parallel {

/// Coordinates of a rank; seeds depend on them.
struct RngPlace {
  int tp = 0, pp = 0, dp = 0, ep = 0, expert_tp = 0;
  bool replicas_differ = false;
};
struct StreamSeeds {
  std::uint64_t default_stream = 0, tensor = 0, expert = 0;
};
StreamSeeds megatron_seeds(std::uint64_t seed, const RngPlace& place);

inline constexpr char kTensorStream[] = "tensor";
inline constexpr char kExpertStream[] = "expert";

/// The streams of one rank except the default one. Uses the calling thread's
/// context.
class RngTracker {
 public:
  /// Begins a stream. Throws Error if the name or the seed is in use: two
  /// streams with one seed would draw equal masks.
  void add(const std::string& name, std::uint64_t seed);

  /// While it lives, operations draw from one stream, starting where the last
  /// fork of that stream ended. The default stream does not move.
  class Fork {
   public:
    Fork(RngTracker& tracker, const std::string& name);
    ~Fork();
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;

   private:
    RngTracker& tracker_;
    RandomState& stream_;
  };
  /// Throws Error for an unknown name, and inside another fork.
  Fork fork(const std::string& name) { return Fork(*this, name); }

  /// The positions of all streams, the default one included.
  struct States {
    RandomState default_stream;
    std::map<std::string, RandomState> others;
  };
  States states() const;
  void set_states(const States& states);

 private:
  RandomState& stream(const std::string& name);

  std::map<std::string, RandomState> streams_;
  bool is_forked_ = false;
};

/// While it lives, all streams continue from `states`.
class Replay {
 public:
  Replay(RngTracker& tracker, const RngTracker::States& states)
      : tracker_(tracker), now_(tracker.states()) {
    tracker_.set_states(states);
  }
  ~Replay() { tracker_.set_states(now_); }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

 private:
  RngTracker& tracker_;
  const RngTracker::States now_;
};

}  // namespace shardbook::tensor_parallel
