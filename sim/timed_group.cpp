#include "sim/timed_group.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <set>
#include <tuple>

#include "core/check.h"

namespace shardbook::sim {
namespace {

// Messages with times have tags of their own.
constexpr int kClockTag = 1 << 24;

// A number that differs for calls that do not match, exact in f64.
double digest(const CommCall& call) {
  std::uint64_t hash = static_cast<std::uint64_t>(call.op);
  const auto mix = [&hash](std::int64_t value) {
    hash = hash * 1000003 + static_cast<std::uint64_t>(value);
  };
  mix(static_cast<int>(call.dtype));
  mix(call.op == CommOp::kAllToAllV ? 0 : call.numel);
  mix(call.root_or_peer);
  mix(static_cast<int>(call.reduce_op));
  return static_cast<double>(hash & ((std::uint64_t{1} << 50) - 1));
}

}  // namespace

// A collective whose end this rank does not know yet.
struct TimedGroup::Pending {
  CommCall call;
  std::int64_t numel_to_peers = 0;  ///< of all_to_all_v
  /// [ready, bytes, digest, -digest], of which the maximum is taken.
  Tensor times;
  Work exchange;
  std::shared_ptr<SharedNetwork::Call> shared;
  bool is_resolved = false;
  double begin_s = 0, end_s = 0;
};

TimedGroup::TimedGroup(ProcessGroup& inner, VirtualClock& clock)
    : ProcessGroup(inner.rank(), inner.ranks(), inner.name()),
      inner_(inner),
      clock_(clock) {}

TimedGroup::TimedGroup(std::shared_ptr<ProcessGroup> inner, VirtualClock& clock,
                       int rank, std::vector<int> ranks, std::string name,
                       std::vector<int> representatives, SharedNetwork* network,
                       std::shared_ptr<SharedNetwork::Channel> channel)
    : ProcessGroup(rank, std::move(ranks), std::move(name)),
      owned_(std::move(inner)),
      inner_(*owned_),
      clock_(clock),
      representatives_(std::move(representatives)),
      network_(network),
      channel_(std::move(channel)) {
  if (network_ != nullptr && channel_ == nullptr) channel_ = network_->world();
}

// The texts of all members, copied from the ranks that run in their places.
std::vector<std::string> TimedGroup::unfolded(
    std::vector<std::string> texts) const {
  if (!is_folded() || texts.empty()) return texts;
  std::vector<std::string> all;
  for (const int representative : representatives_) {
    all.push_back(texts[static_cast<std::size_t>(representative)]);
  }
  return all;
}

std::vector<std::string> TimedGroup::exchange(const std::string& text) {
  return unfolded(inner_.exchange(text));
}

std::vector<std::string> TimedGroup::collect(const std::string& text) {
  return unfolded(inner_.collect(text));
}

void TimedGroup::set_timeout(std::chrono::milliseconds timeout) {
  inner_.set_timeout(timeout);
}

void TimedGroup::abort(const std::string& reason) { inner_.abort(reason); }

// --- Collectives -------------------------------------------------------------

// Lines are free when time restarts. When the clock skips time, they stay busy
// that much longer.
void TimedGroup::follow_clock() {
  if (network_ != nullptr) {
    if (clock_.num_skips() > 0) {
      network_->follow_skip(clock_.epoch(), clock_.num_skips(),
                            clock_.skipped_s());
    }
    return;
  }
  if (epoch_ != clock_.epoch()) {
    epoch_ = clock_.epoch();
    skipped_s_ = clock_.skipped_s();
    free_s_ = 0;
    line_free_s_.clear();
  }
  const double skipped = clock_.skipped_s() - skipped_s_;
  if (skipped == 0) return;
  skipped_s_ = clock_.skipped_s();
  free_s_ += skipped;
  for (auto& [peer, free] : line_free_s_) free += skipped;
}

std::pair<double, double> TimedGroup::wait_shared(const FlowRef& flow) {
  follow_clock();
  return network_->wait(flow, fiber(), clock_.epoch());
}

bool TimedGroup::has_all_that_run() const {
  return network_ != nullptr &&
         channel_->num_running ==
             static_cast<std::size_t>(network_->num_fibers());
}

Work TimedGroup::timed(const CommCall& call, std::int64_t numel_to_peers,
                       Work data) {
  follow_clock();
  auto pending = std::make_shared<Pending>();
  pending->call = call;
  pending->numel_to_peers = numel_to_peers;
  const double bytes = static_cast<double>(call.numel) *
                       static_cast<double>(dtype_bytes(call.dtype));
  const double check = digest(call);
  const double ready = clock_.issue_message();
  pending->times = Tensor::from_values<double>({ready, bytes, check, -check},
                                               {4}, clock_memory_);
  if (network_ != nullptr) {
    pending->shared = network_->join(*channel_, num_calls_++, call.op, bytes,
                                     ready, clock_.epoch());
  }
  pending->exchange = inner_.all_reduce(pending->times, ReduceOp::kMax);
  inner_.clear_records();
  pending_.push_back(pending);
  return Work(
      [this, pending, data]() mutable {
        data.wait();
        resolve(*pending);
        clock_.wait_message(pending->begin_s, pending->end_s);
      },
      [pending, data] { return data.done() && pending->exchange.done(); });
}

TimelineEvent TimedGroup::event_of(const CommCall& call,
                                   const char* queue) const {
  TimelineEvent event;
  if (!clock_.records_events()) return event;
  event.name = comm_op_name(call.op);
  event.label = call.label;
  event.category = "comm";
  event.queue = queue + name();
  return event;
}

// Calls end in the order of their issue, so those before it come first.
void TimedGroup::resolve(Pending& last) {
  while (!last.is_resolved) {
    const std::shared_ptr<Pending> next = pending_.front();
    pending_.pop_front();
    next->exchange.wait();
    const double* times = next->times.data<double>();
    SB_CHECK(times[2] == -times[3], call_text(next->call), " over '", name(),
             "' (rank ", rank(), " of ", size(),
             "): other ranks issued another call in its place");

    CommRecord record;
    record.op = next->call.op;
    record.group_size = size();
    record.group_rank = rank();
    record.dtype = next->call.dtype;
    record.numel = next->call.numel;
    record.numel_to_peers = next->numel_to_peers;
    record.root_or_peer = next->call.root_or_peer;
    const CostModel& model = clock_.model();
    Cost cost;
    TimelineEvent event = event_of(next->call, "comm ");
    if (network_ != nullptr) {
      std::tie(event.begin_s, event.end_s) = wait_shared(next->shared->flow);
      cost = next->shared->cost;
    } else {
      cost = model.collective(next->call.op, times[1], ranks());
      event.begin_s = std::max(times[0], free_s_);
      event.end_s = event.begin_s + cost.seconds * model.link_slowdown(ranks());
    }
    event.bytes = wire_bytes(record);
    next->begin_s = event.begin_s;
    next->end_s = free_s_ = event.end_s;
    next->is_resolved = true;
    clock_.add_message(std::move(event), model.link(ranks()).name, cost.trust);
  }
}

Work TimedGroup::do_collective(const CommCall& call,
                               const CommBuffers& buffers) {
  const Tensor& any = buffers.output.defined() ? buffers.output : buffers.input;
  const bool has_data = any.defined() && moves(any);
  const bool has_counts = call.op == CommOp::kAllToAllV;
  return timed(
      call,
      has_counts
          ? call.numel - buffers.send_counts[static_cast<std::size_t>(rank())]
          : 0,
      has_data ? inner_.issue(call, buffers) : Work());
}

// --- Messages ----------------------------------------------------------------

namespace {

// A message has left when the line is free of it and arrives a latency later.
Work message_work(Work data, std::function<void()> arrive) {
  return Work(
      [data, arrive = std::move(arrive)]() mutable {
        data.wait();
        arrive();
      },
      [data] { return data.done(); });
}

}  // namespace

Work TimedGroup::do_send(const Tensor& tensor, const CommCall& call) {
  follow_clock();
  const int to = call.root_or_peer;
  const CostModel& model = clock_.model();
  const std::vector<int> ends = {world_rank(rank()), world_rank(to)};
  const std::string& link = model.link(ends).name;
  const auto bytes = static_cast<double>(tensor.bytes());
  const double ready = clock_.issue_message();
  TimelineEvent event = event_of(call, "send ");
  event.peer = ends[1];
  event.message = num_sent_[to]++;
  event.bytes = bytes;

  // The receiver learns which message it is and when it arrives; where the end
  // is not known yet, it gets a number by which it asks the network.
  Facts facts = {0, 0, static_cast<double>(event.message)};
  std::function<void()> arrive;
  if (network_ != nullptr) {
    const Cost& cost =
        network_->message_cost(*channel_, bytes, ends[0], ends[1]);
    clock_.count_message(link, bytes, cost.trust);
    const std::uint64_t number =
        network_->send(*channel_, bytes, ends[0], ends[1], ready,
                       clock_.epoch(), fiber(), std::move(event));
    facts[0] = static_cast<double>(number);
    arrive = [this, flow = network_->sent(number)] {
      const auto [begin, end] = wait_shared(flow);
      clock_.wait_message(begin, end);
    };
  } else {
    const Cost cost = model.message(bytes, ends[0], ends[1]);
    double& free_s = line_free_s_[to];
    const double begin = facts[0] = event.begin_s = std::max(ready, free_s);
    const double end = facts[1] = event.end_s = free_s =
        begin + cost.seconds * model.link_slowdown(ends);
    clock_.add_message(std::move(event), link, cost.trust);
    arrive = [this, begin, end] { clock_.wait_message(begin, end); };
  }
  const int peer = running(to);
  if (peer == inner_.rank()) {
    to_itself_[call.tag].push_back(facts);
    return message_work(Work(), std::move(arrive));
  }
  const Tensor times = Tensor::from_values<double>({facts.begin(), facts.end()},
                                                   {3}, clock_memory_);
  while (!sent_.empty() && sent_.front().first.done()) sent_.pop_front();
  sent_.emplace_back(inner_.send(times, peer, call.tag + kClockTag), times);
  Work data =
      moves(tensor) ? inner_.send(tensor, peer, call.tag, call.label) : Work();
  inner_.clear_records();
  return message_work(std::move(data), std::move(arrive));
}

Work TimedGroup::do_recv(const Tensor& tensor, const CommCall& call) {
  const int from = call.root_or_peer, peer = running(from);
  const bool is_mine = peer == inner_.rank();
  Tensor times;
  clock_.issue_message();
  Work arrival, data;
  if (!is_mine) {
    times = Tensor::empty({3}, {DType::kF64, clock_memory_});
    arrival = inner_.recv(times, peer, call.tag + kClockTag);
    if (moves(tensor)) data = inner_.recv(tensor, peer, call.tag, call.label);
    inner_.clear_records();
  }
  auto arrive = [this, times, call, from, is_mine,
                 arrival = std::make_shared<Work>(arrival)]() mutable {
    Facts values;
    if (is_mine) {
      std::deque<Facts>& sent = to_itself_[call.tag];
      SB_CHECK(!sent.empty(), call_text(call), " over '", name(), "' (rank ",
               rank(), " of ", size(),
               "): folded ranks wait for a message that none of them sends");
      values = sent.front();
      sent.pop_front();
    } else {
      arrival->wait();
      std::copy_n(times.data<double>(), values.size(), values.begin());
    }
    TimelineEvent event = event_of(call, "recv ");
    event.peer = world_rank(from);
    event.message = static_cast<std::int64_t>(values[2]);
    // The time on the wire; waiting for the receiver is not communication
    event.begin_s = values[0];
    event.end_s = values[1];
    if (network_ != nullptr) {
      const FlowRef flow =
          network_->received(static_cast<std::uint64_t>(values[0]));
      std::tie(event.begin_s, event.end_s) = wait_shared(flow);
    }
    const double begin = event.begin_s, end = event.end_s;
    clock_.add_message(
        std::move(event),
        clock_.model().link({world_rank(from), world_rank(rank())}).name,
        Trust::kCalibrated);
    clock_.wait_message(begin, end);
  };
  return message_work(std::move(data), std::move(arrive));
}

// --- Subgroups ---------------------------------------------------------------

std::shared_ptr<ProcessGroup> TimedGroup::do_subgroup(
    const std::vector<int>& members, const std::string& name) {
  std::vector<int> world_ranks;
  for (const int member : members) world_ranks.push_back(world_rank(member));
  const auto my_place = std::find(members.begin(), members.end(), rank());
  const int my_rank = static_cast<int>(my_place - members.begin());
  if (!is_folded()) {
    std::shared_ptr<ProcessGroup> group = inner_.subgroup_of(members, name);
    return std::make_shared<TimedGroup>(std::move(group), clock_, my_rank,
                                        std::move(world_ranks), name,
                                        std::vector<int>());
  }
  // The ranks that run in the members' places, each once.
  std::set<int> runners;
  for (const int member : members) runners.insert(running(member));
  const std::vector<int> distinct(runners.begin(), runners.end());
  std::vector<int> representatives;
  for (const int member : members) {
    representatives.push_back(static_cast<int>(
        std::distance(runners.begin(), runners.find(running(member)))));
  }
  std::shared_ptr<SharedNetwork::Channel> channel;
  if (network_ != nullptr) {
    channel = network_->channel(*channel_, distinct, num_made_[distinct]++,
                                world_ranks);
  }
  return std::make_shared<TimedGroup>(inner_.subgroup_of(distinct, name),
                                      clock_, my_rank, std::move(world_ranks),
                                      name, std::move(representatives),
                                      network_, std::move(channel));
}

}  // namespace shardbook::sim
