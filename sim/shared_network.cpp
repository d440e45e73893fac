#include "sim/shared_network.h"

#include <algorithm>
#include <functional>
#include <set>

namespace shardbook::sim {

SharedNetwork::SharedNetwork(const CostModel& model, FiberControl& fibers,
                             const std::vector<int>& running,
                             const std::vector<int>& representatives)
    : model_(model),
      fibers_(fibers),
      running_(running),
      representatives_(representatives),
      clocks_(running.size(), nullptr) {
  for (const int rank : running) {
    running_on_[model.cluster().node_of(rank)].push_back(rank);
  }
  world_->num_running = running.size();
  for (std::size_t rank = 0; rank < representatives.size(); ++rank) {
    world_->ranks.push_back(static_cast<int>(rank));
  }
  world_->calls.uses = uses_of_group(world_->ranks);
}

std::shared_ptr<SharedNetwork::Channel> SharedNetwork::channel(
    Channel& parent, const std::vector<int>& running_members, std::size_t index,
    const std::vector<int>& ranks) {
  auto& same = parent.made[running_members];
  while (same.size() <= index) {
    auto made = std::make_shared<Channel>();
    made->ranks = ranks;
    made->num_running = running_members.size();
    made->calls.uses = uses_of_group(ranks);
    same.push_back(std::move(made));
  }
  return same[index];
}

// --- Messages ----------------------------------------------------------------

const Cost& SharedNetwork::cost(Line& line, CommOp op, double bytes,
                                const std::vector<int>& ranks) const {
  const auto [found, is_new] =
      line.costs.try_emplace({static_cast<int>(op), bytes});
  if (is_new) found->second = model_.collective(op, bytes, ranks);
  return found->second;
}

FlowRef SharedNetwork::begin(Line& line, const Cost& cost,
                             const std::vector<int>& ranks, double ready_s,
                             int number,
                             std::function<void(const FlowRef&)> when_over) {
  const double slowdown = model_.link_slowdown(ranks);
  Flow flow;
  flow.ready_s = ready_s;
  flow.seconds = cost.seconds * slowdown;
  if (cost.transfer_s > 0 && line.uses != nullptr) {
    flow.transfer_s = cost.transfer_s * slowdown;
    flow.max_rate = cost.rate / slowdown;
    flow.uses = line.uses;
    // Alone, it may also use the share that the price leaves to others
    double alone = cost.max_rate;
    for (const LinkUse& use : *flow.uses) {
      alone = std::min(
          alone, capacities_[static_cast<std::size_t>(use.link)] / use.streams);
    }
    if (alone > cost.rate) {
      const double latency_s = flow.seconds - flow.transfer_s;
      flow.transfer_s *= cost.rate / alone;
      flow.seconds = latency_s + flow.transfer_s;
      flow.max_rate = alone / slowdown;
    }
  }
  if (line.epoch != number) line.last = nullptr;
  line.epoch = number;
  line.last = epoch(number).network.add(
      flow, line.last,
      [this, notify = std::move(when_over)](const FlowRef& over) {
        if (notify) notify(over);
        wake(over);
      });
  return line.last;
}

std::shared_ptr<SharedNetwork::Call> SharedNetwork::join(
    Channel& channel, std::uint64_t index, CommOp op, double bytes,
    double ready_s, int epoch) {
  const auto place = static_cast<std::size_t>(index - channel.num_closed);
  while (channel.open.size() <= place) {
    channel.open.push_back(std::make_shared<Call>());
  }
  const std::shared_ptr<Call> call = channel.open[place];
  call->ready_s = std::max(call->ready_s, ready_s);
  call->bytes = std::max(call->bytes, bytes);
  ++call->num_joined;
  // Calls begin in the order of their issue
  while (!channel.open.empty() && channel.open.front()->num_joined ==
                                      static_cast<int>(channel.num_running)) {
    Call& next = *channel.open.front();
    next.cost = cost(channel.calls, op, next.bytes, channel.ranks);
    next.flow = begin(channel.calls, next.cost, channel.ranks, next.ready_s,
                      epoch, nullptr);
    channel.open.pop_front();
    ++channel.num_closed;
  }
  return call;
}

const Cost& SharedNetwork::message_cost(Channel& channel, double bytes,
                                        int from, int to) {
  const auto [line, is_new] = channel.messages.try_emplace({from, to});
  if (is_new) line->second.uses = uses_of_message(from, to);
  return cost(line->second, CommOp::kSend, bytes, {from, to});
}

std::uint64_t SharedNetwork::send(Channel& channel, double bytes, int from,
                                  int to, double ready_s, int epoch, int fiber,
                                  TimelineEvent event) {
  const Cost& price = message_cost(channel, bytes, from, to);
  const std::uint64_t number = num_sent_++;
  const auto clock_of = [this, fiber] {
    return clocks_[static_cast<std::size_t>(fiber)];
  };
  std::function<void(const FlowRef&)> notify;
  if (clock_of() != nullptr && clock_of()->records_events()) {
    notify = [clock_of, entry = std::move(event)](const FlowRef& flow) mutable {
      if (clock_of() == nullptr) return;
      entry.begin_s = flow->begin_s;
      entry.end_s = flow->end_s;
      clock_of()->add_event(std::move(entry));
    };
  }
  sent_[number] = begin(channel.messages.at({from, to}), price, {from, to},
                        ready_s, epoch, notify);
  return number;
}

FlowRef SharedNetwork::received(std::uint64_t number) {
  FlowRef flow = sent_.at(number);
  sent_.erase(number);
  return flow;
}

std::shared_ptr<void> SharedNetwork::attach(int fiber, VirtualClock& clock) {
  VirtualClock*& place = clocks_[static_cast<std::size_t>(fiber)];
  place = &clock;
  return {&place, [](VirtualClock** attached) { *attached = nullptr; }};
}

// --- Time --------------------------------------------------------------------

SharedNetwork::Epoch& SharedNetwork::epoch(int number) {
  const auto [found, is_new] = epochs_.try_emplace(number);
  if (is_new) {
    for (const double each : capacities_) found->second.network.add_link(each);
  }
  return found->second;
}

std::pair<double, double> SharedNetwork::wait(const FlowRef& flow, int fiber,
                                              int number) {
  Epoch& mine = epoch(number);
  if (!flow->is_over) {
    ++mine.num_waiting;
    waiting_[flow.get()].push_back(fiber);
    while (!flow->is_over) fibers_.suspend(fiber);
    --mine.num_waiting;
  }
  const double shift = mine.network.shift_since(flow);
  return {flow->begin_s + shift, flow->end_s + shift};
}

void SharedNetwork::wake(const FlowRef& flow) {
  const auto found = waiting_.find(flow.get());
  if (found == waiting_.end()) return;
  for (const int fiber : found->second) fibers_.make_ready(fiber);
  waiting_.erase(found);
  has_woken_ = true;
}

bool SharedNetwork::advance() {
  has_woken_ = false;
  for (auto& [number, each] : epochs_) {
    if (each.num_waiting == 0) continue;
    while (!has_woken_ && each.network.advance() != nullptr) {
    }
    if (has_woken_) return true;
  }
  return false;
}

void SharedNetwork::follow_skip(int number, int num_skips, double skipped_s) {
  // Time skipped before the epoch began does not count
  const bool is_new = epochs_.count(number) == 0;
  Epoch& mine = epoch(number);
  if (!is_new && mine.num_skips < num_skips) {
    mine.network.shift(skipped_s - mine.skipped_s);
  }
  if (is_new || mine.num_skips < num_skips) {
    mine.num_skips = num_skips;
    mine.skipped_s = skipped_s;
  }
}

// --- Links -------------------------------------------------------------------

bool SharedNetwork::is_shared() const {
  const Cluster& cluster = model_.cluster();
  return !cluster.shares_memory && cluster.intra_node.name != "flat";
}

int SharedNetwork::nic_of(int rank) const {
  const Cluster& cluster = model_.cluster();
  const int device = rank % cluster.devices_per_node;
  return device * std::min(cluster.nics_per_node, cluster.devices_per_node) /
         cluster.devices_per_node;
}

double SharedNetwork::capacity(Kind kind, int rank) const {
  const Cluster& cluster = model_.cluster();
  const int device = rank % cluster.devices_per_node;
  if (kind == Kind::kPcie) return cluster.host_link.speed();
  if (kind == Kind::kNic) {
    return cluster.network.speed() * cluster.nics_per_node /
           std::min(cluster.nics_per_node, cluster.devices_per_node);
  }
  int count = cluster.mesh.empty() ? 1 : 0;
  for (const MeshLink& each : cluster.mesh) {
    if (each.a == device || each.b == device) count += each.count;
  }
  return count * cluster.intra_node.speed();
}

int SharedNetwork::link(Kind kind, int rank, bool is_out) {
  const int node = model_.cluster().node_of(rank);
  const int place = kind == Kind::kNic ? nic_of(rank) : rank;
  const auto [found, is_new] = link_numbers_.try_emplace(
      {kind, node, place, is_out}, static_cast<int>(capacities_.size()));
  if (is_new) {
    capacities_.push_back(capacity(kind, rank));
    for (auto& [number, each] : epochs_) {
      each.network.add_link(capacities_.back());
    }
  }
  return found->second;
}

// The ranks on this rank's node with the same representative, itself included.
std::vector<int> SharedNetwork::classmates(int rank) const {
  const Cluster& cluster = model_.cluster();
  const int first = cluster.node_of(rank) * cluster.devices_per_node;
  const int last = std::min(first + cluster.devices_per_node,
                            static_cast<int>(representatives_.size()));
  std::vector<int> result;
  for (int each = first; each < last; ++each) {
    if (representatives_[static_cast<std::size_t>(each)] ==
        representatives_[static_cast<std::size_t>(rank)]) {
      result.push_back(each);
    }
  }
  return result;
}

FlowUses SharedNetwork::uses_of_group(const std::vector<int>& ranks) {
  if (!is_shared() || ranks.size() < 2) return nullptr;
  const Cluster& cluster = model_.cluster();
  std::map<int, std::vector<int>> nodes;
  for (const int rank : ranks) nodes[cluster.node_of(rank)].push_back(rank);
  std::size_t fewest = ranks.size();
  for (const auto& [node, members] : nodes) {
    fewest = std::min(fewest, members.size());
  }
  const bool is_inside = nodes.size() == 1;
  const bool over_pcie = &model_.link(ranks) == &cluster.host_link;
  std::vector<LinkUse> uses;
  for (const auto& [node, members] : nodes) {
    const auto here = running_on_.find(node);
    if (here == running_on_.end()) continue;
    // The members' classes, whose groups run in lock-step
    std::set<int> mates;
    for (const int member : members) {
      for (const int mate : classmates(member)) mates.insert(mate);
    }
    const double streams =
        static_cast<double>(fewest) / static_cast<double>(members.size());
    std::map<int, double> nics;
    for (const int mate : mates) nics[nic_of(mate)] += streams;
    std::set<int> seen;
    for (const int rank : here->second) {
      const int nic = nic_of(rank);
      if (!is_inside && nics.count(nic) > 0 && seen.insert(nic).second) {
        for (const bool is_out : {true, false}) {
          uses.push_back({link(Kind::kNic, rank, is_out), nics[nic]});
        }
      }
      if (members.size() == 1 || mates.count(rank) == 0) continue;
      const Kind kind = is_inside && over_pcie ? Kind::kPcie : Kind::kPort;
      for (const bool is_out : {true, false}) {
        uses.push_back({link(kind, rank, is_out),
                        is_inside ? 1 : static_cast<double>(fewest)});
      }
    }
  }
  return use_links(std::move(uses));
}

FlowUses SharedNetwork::uses_of_message(int from, int to) {
  if (!is_shared() || from == to) return nullptr;
  const Cluster& cluster = model_.cluster();
  const bool is_inside = cluster.node_of(from) == cluster.node_of(to);
  const bool over_pcie = &model_.link({from, to}) == &cluster.host_link;
  std::vector<LinkUse> uses;
  for (const bool is_out : {true, false}) {
    const auto end = static_cast<std::size_t>(is_out ? from : to);
    const int rank = running_[static_cast<std::size_t>(representatives_[end])];
    if (is_inside) {
      const Kind kind = over_pcie ? Kind::kPcie : Kind::kPort;
      uses.push_back({link(kind, rank, is_out), 1});
      continue;
    }
    double streams = 0;
    for (const int mate : classmates(rank)) {
      if (nic_of(mate) == nic_of(rank)) ++streams;
    }
    uses.push_back({link(Kind::kNic, rank, is_out), streams});
  }
  return use_links(std::move(uses));
}

}  // namespace shardbook::sim
