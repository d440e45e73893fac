#pragma once

// Virtual time around any process group.
//
// Data travel through the inner group as usual. Each call also carries the time
// at which its data were ready: the members agree on the latest, add the cost
// of the call, and get the time at which it ended for all of them.
//
//   rank 0   ready 3 ms  \.
//   rank 1   ready 5 ms   } all begin at 5 ms, or when the group's last call
//   rank 2   ready 4 ms  /  has ended; all end `cost` later
//
// Times are exchanged as data, so they do not depend on which thread comes
// first, and need no common memory: ranks may be threads, fibers or processes.
//
// In the `sim` world, messages share links, and the network determines when
// each one ends (sim/shared_network.h). Elsewhere each call is priced alone.
//
// Folding. Ranks that do the same on data of the same shapes need not all run.
// A group may have more members than the inner group: `representatives` names
// the rank that runs in place of each. Costs, ledger and errors use the true
// size. In a ring of folded ranks, each one's message to the next arrives at the
// representative itself.

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "sim/shared_network.h"
#include "sim/virtual_clock.h"

namespace shardbook::sim {

class TimedGroup : public ProcessGroup {
 public:
  /// `inner` and `clock` must outlive it. All members construct it together.
  TimedGroup(ProcessGroup& inner, VirtualClock& clock);
  /// Folded: rank `rank` of the group of world ranks `ranks`, of which
  /// representatives[i] (a rank of `inner`) runs in the place of member i.
  /// Tensors are on meta devices. `network` is null where messages are priced
  /// alone; it must outlive the group.
  TimedGroup(std::shared_ptr<ProcessGroup> inner, VirtualClock& clock, int rank,
             std::vector<int> ranks, std::string name,
             std::vector<int> representatives, SharedNetwork* network = nullptr,
             std::shared_ptr<SharedNetwork::Channel> channel = nullptr);

  /// Messages share links, and its members are all ranks that run.
  bool has_all_that_run() const;
  bool shares_links() const { return network_ != nullptr; }
  bool is_first() const override { return inner_.rank() == 0; }

  std::vector<std::string> exchange(const std::string& text) override;
  std::vector<std::string> collect(const std::string& text) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;

 protected:
  bool takes_meta() const override { return true; }
  Work do_collective(const CommCall& call, const CommBuffers& buffers) override;
  Work do_send(const Tensor& tensor, const CommCall& call) override;
  Work do_recv(const Tensor& tensor, const CommCall& call) override;
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override;

 private:
  struct Pending;

  bool is_folded() const { return !representatives_.empty(); }
  /// The rank of the inner group that runs in the place of this member.
  int running(int member) const {
    return is_folded() ? representatives_[static_cast<std::size_t>(member)]
                       : member;
  }
  static bool moves(const Tensor& tensor) { return !tensor.is_meta(); }
  Work timed(const CommCall& call, std::int64_t numel_to_peers, Work data);
  void resolve(Pending& pending);
  std::vector<std::string> unfolded(std::vector<std::string> texts) const;
  TimelineEvent event_of(const CommCall& call, const char* queue) const;
  void follow_clock();
  std::pair<double, double> wait_shared(const FlowRef& flow);
  int fiber() const { return inner_.world_rank(inner_.rank()); }

  std::shared_ptr<ProcessGroup> owned_;
  ProcessGroup& inner_;
  VirtualClock& clock_;
  std::vector<int> representatives_;
  SharedNetwork* network_ = nullptr;
  std::shared_ptr<SharedNetwork::Channel> channel_;
  std::uint64_t num_calls_ = 0;
  std::map<std::vector<int>, std::size_t> num_made_;  ///< by running members
  /// Holds times while they travel: the memory of the rank's device is counted.
  Device clock_memory_ = Device::cpu();
  /// Collectives whose end is not known yet, in the order of their issue.
  std::deque<std::shared_ptr<Pending>> pending_;
  double free_s_ = 0;  ///< when the group's last collective has ended
  /// Messages: when the line to each peer is free, and how many were sent.
  std::map<int, double> line_free_s_;
  std::map<int, std::int64_t> num_sent_;
  int epoch_ = 0;
  double skipped_s_ = 0;
  /// Of a message: when it leaves, or the network's number; when it arrives; how
  /// many went before it.
  using Facts = std::array<double, 3>;
  /// Times that are on their way to receivers.
  std::deque<std::pair<Work, Tensor>> sent_;
  /// The same of messages between folded ranks that this one runs in place of:
  /// what it sends is what it gets. By tag.
  std::map<int, std::deque<Facts>> to_itself_;
};

}  // namespace shardbook::sim
