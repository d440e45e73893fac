#pragma once

// Messages that share links.
//
//   FlowNetwork network;
//   Flow flow;  // 25 GB through one NIC, beginning at once
//   flow.seconds = flow.transfer_s = 1;
//   flow.max_rate = 25e9;
//   flow.uses = use_links({{network.add_link(25e9), 1}});
//   const FlowRef first = network.add(flow), second = network.add(flow);
//   network.advance();          // to the next end of a flow
//   first->end_s;               // 2 s: each has had half of the NIC
//
// A flow is a message or a collective that is under way. It has streams, one
// per NIC or port that it uses, which all move at the same rate. After its
// latency, a flow takes as much of its links as it can use. Where the flows on
// a link want more than the link carries, they share it by max-min fairness:
// all rates rise together, and a stream stops rising when its flow has all that
// it can use, or when one of its links is full.
//
//   link of 10, streams that want 2, 4 and 9:   rates 2, 4 and 4
//
// The rates change when a flow begins to transfer or ends, and at no other
// time. So the network jumps from one such event to the next. Times are virtual:
// they depend on the flows, not on the order in which flows of one instant are
// added, and not on the machine. A flow that meets no other ends exactly
// `seconds` after its begin.
//
// The caller adds flows that begin before the next end and then calls
// advance(). A flow that begins earlier than the network's time is late: it has
// run alone until now.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace shardbook::sim {

/// Number of streams that a flow sends through a link, including groups in
/// lock-step with it that are not flows themselves.
struct LinkUse {
  int link = 0;
  double streams = 1;
};
using FlowUses = std::shared_ptr<const std::vector<LinkUse>>;
FlowUses use_links(std::vector<LinkUse> uses);

struct Flow {
  /// When its data are ready. It begins then, or at the end of the flow that it
  /// follows.
  double ready_s = 0;
  /// From begin to end if it is alone.
  double seconds = 0;
  /// The last part of `seconds`, in which links carry it.
  double transfer_s = 0;
  /// Bytes per second of each stream in that part, if it is alone.
  double max_rate = 0;
  /// Null: it meets no other flow.
  FlowUses uses;
};

struct FlowState;
using FlowRef = std::shared_ptr<FlowState>;

/// A flow under way; only the network changes it.
struct FlowState : std::enable_shared_from_this<FlowState> {
  Flow flow;
  std::uint64_t number = 0;
  std::function<void(const FlowRef&)> when_over;
  /// Flows that begin when this one ends.
  std::vector<FlowRef> followers;
  double begin_s = 0, end_s = 0;  ///< the end is known when it is over
  double shifted_s = 0;  ///< by how much the network had shifted at its end
  bool has_entered = false, is_over = false;
  /// It was slowed by others: its end is no longer begin plus `seconds`.
  bool has_shared = false;
  double rate = 0;     ///< bytes per second of each stream
  double left = 0;     ///< bytes of each stream at `since_s`
  double since_s = 0;  ///< when `rate` began
  int version = 0;     ///< of its event; older events are void
  /// While rates are computed: not known yet; known from this round on.
  bool is_rising = false, stops = false;

  bool is_under_way() const { return has_entered && !is_over; }
  double enters_s() const { return begin_s + (flow.seconds - flow.transfer_s); }
  bool uses_links() const {
    return flow.uses != nullptr && !flow.uses->empty() && flow.transfer_s > 0;
  }
};

class FlowNetwork {
 public:
  FlowNetwork() = default;
  FlowNetwork(const FlowNetwork&) = delete;
  FlowNetwork& operator=(const FlowNetwork&) = delete;

  /// Returns the number of a new link.
  int add_link(double bytes_per_s);
  /// `after`: the flow that this one follows on the same queue, or null.
  /// `when_over`: called once, as soon as the end is known.
  FlowRef add(const Flow& flow, const FlowRef& after = nullptr,
              std::function<void(const FlowRef&)> when_over = nullptr);
  /// Moves on to the next end of a flow. Returns that flow, or null when no
  /// flow is under way.
  FlowRef advance();
  /// Adds `seconds` to the network's time, to the times of all flows under way,
  /// and to the times at which queues are free.
  void shift(double seconds);

  double now_s() const { return now_s_; }
  /// By how much the network has shifted since this flow was over.
  double shift_since(const FlowRef& flow) const;
  /// Bytes per second that a link carries now, and at most.
  double load(int link) const;
  double capacity(int link) const;

 private:
  struct Streams {
    FlowState* flow = nullptr;
    double count = 1;
  };
  struct Link {
    double bytes_per_s = 0;
    std::vector<Streams> flows;  ///< of flows under way
    bool is_in_share = false;
  };
  struct Event {
    double at_s = 0;
    bool is_end = false;       ///< of a flow; otherwise its entry
    std::uint64_t number = 0;  ///< of the flow: breaks ties
    FlowRef flow;
    int version = 0;
  };
  static bool is_later(const Event& a, const Event& b);

  void begin(const FlowRef& flow, double begin_s);
  void enter(const FlowRef& flow);
  void finish(const FlowRef& flow, double end_s);
  static bool has_enough(const Link& link);
  void share(const std::vector<FlowState*>& seeds);
  void set_rate(FlowState& flow, double rate);
  void push(const FlowRef& flow, double at_s);

  double now_s_ = 0;
  double shifted_s_ = 0;
  std::uint64_t num_flows_ = 0;
  std::vector<Link> links_;
  std::vector<Event> events_;  ///< a heap
};

}  // namespace shardbook::sim
