#pragma once

// The network of one `sim` world: which links each message loads, and when it
// ends.
//
//   links            capacity                           loaded by
//   NIC, out and in  a NIC, or a device's share of      what leaves or enters
//                    several                            the node
//   port, out and in a device's links within its node   what stays in the node
//   PCIe, out, in    where no such link leads           the same
//
// A message between nodes is one stream from NIC to NIC. A collective over
// several nodes is one stream per member and NIC; within a node, its rings pass
// each member's port. Device d uses NIC d * NICs / devices. A node with fewer
// NICs than devices has NICs that several devices share, and a group that is
// alone on one has all of it.
//
// Ranks are fibers that run ahead in virtual time and stop where they need the
// end of a message. When none can go on, every message that begins before the
// next end is known. So the network moves on to that end and wakes the ranks
// that wait for it.
//
// Folding. A class of ranks on one node runs in lock-step with its
// representative. The groups of the others have the same streams as the
// representative's group, and these count on their NICs. Links of ranks that do
// not run are in the state of their representatives' links and are not kept.
//
// On clusters with a flat network or a shared memory, messages are priced alone:
// a textbook's network is never busy, and exchanges of cores were measured.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/ledger.h"
#include "sim/cost_model.h"
#include "sim/fiber_world.h"
#include "sim/flow_network.h"
#include "sim/virtual_clock.h"

namespace shardbook::sim {

class SharedNetwork {
 public:
  /// Messages over one queue follow each other.
  struct Line {
    int epoch = -1;
    FlowRef last;
    FlowUses uses;
    std::map<std::pair<int, double>, Cost> costs;  ///< by CommOp and bytes
  };
  /// One collective: its flow begins when all members that run have joined.
  struct Call {
    double ready_s = 0, bytes = 0;
    int num_joined = 0;
    FlowRef flow;
    Cost cost;
  };
  /// State that the members of one group share.
  struct Channel {
    std::vector<int> ranks;
    std::size_t num_running = 0;  ///< members that are fibers
    Line calls;
    std::deque<std::shared_ptr<Call>> open;  ///< not all have joined
    std::uint64_t num_closed = 0;
    std::map<std::pair<int, int>, Line> messages;  ///< by world ranks
    std::map<std::vector<int>, std::vector<std::shared_ptr<Channel>>> made;
  };

  /// `running`: the world ranks that are fibers; `representatives`: for each
  /// world rank, the fiber that runs in its place. All must outlive it.
  SharedNetwork(const CostModel& model, FiberControl& fibers,
                const std::vector<int>& running,
                const std::vector<int>& representatives);

  std::shared_ptr<Channel> world() { return world_; }
  /// The `index`-th group of these running members, made from `parent`.
  std::shared_ptr<Channel> channel(Channel& parent,
                                   const std::vector<int>& running_members,
                                   std::size_t index,
                                   const std::vector<int>& ranks);

  /// This member is ready for the group's call number `index`.
  std::shared_ptr<Call> join(Channel& channel, std::uint64_t index, CommOp op,
                             double bytes, double ready_s, int epoch);
  /// A message from world rank `from` to `to`. As soon as its end is known,
  /// `event` is added to the timeline of the fiber. Returns its number.
  std::uint64_t send(Channel& channel, double bytes, int from, int to,
                     double ready_s, int epoch, int fiber, TimelineEvent event);
  /// The message of this number; the receiver asks for it once.
  FlowRef sent(std::uint64_t number) const { return sent_.at(number); }
  FlowRef received(std::uint64_t number);
  const Cost& message_cost(Channel& channel, double bytes, int from, int to);

  /// Lets a fiber's messages reach its clock while the result lives.
  std::shared_ptr<void> attach(int fiber, VirtualClock& clock);
  /// Blocks the fiber until the flow is over. Returns its begin and end, which
  /// move on when the clocks skip time.
  std::pair<double, double> wait(const FlowRef& flow, int fiber, int epoch);
  int num_fibers() const { return static_cast<int>(running_.size()); }
  /// Call when no fiber can go on. False: the network cannot help either.
  bool advance();
  /// All clocks have skipped time, `num_skips` times and `skipped_s` in all.
  void follow_skip(int epoch, int num_skips, double skipped_s);

 private:
  enum class Kind { kNic, kPort, kPcie };
  struct Epoch {
    FlowNetwork network;
    int num_waiting = 0;
    int num_skips = 0;
    double skipped_s = 0;
  };
  Epoch& epoch(int number);
  bool is_shared() const;
  int link(Kind kind, int rank, bool is_out);
  int nic_of(int rank) const;
  double capacity(Kind kind, int rank) const;
  std::vector<int> classmates(int rank) const;
  FlowUses uses_of_group(const std::vector<int>& ranks);
  FlowUses uses_of_message(int from, int to);
  const Cost& cost(Line& line, CommOp op, double bytes,
                   const std::vector<int>& ranks) const;
  FlowRef begin(Line& line, const Cost& cost, const std::vector<int>& ranks,
                double ready_s, int epoch,
                std::function<void(const FlowRef&)> when_over);
  void wake(const FlowRef& flow);

  const CostModel& model_;
  FiberControl& fibers_;
  const std::vector<int>& running_;
  const std::vector<int>& representatives_;
  std::shared_ptr<Channel> world_ = std::make_shared<Channel>();
  std::map<int, std::vector<int>> running_on_;  ///< world ranks by node
  std::vector<VirtualClock*> clocks_;           ///< by fiber
  std::map<int, Epoch> epochs_;
  std::map<std::tuple<Kind, int, int, bool>, int> link_numbers_;
  std::vector<double> capacities_;
  std::unordered_map<const FlowState*, std::vector<int>> waiting_;
  std::unordered_map<std::uint64_t, FlowRef> sent_;
  std::uint64_t num_sent_ = 0;
  bool has_woken_ = false;
};

}  // namespace shardbook::sim
