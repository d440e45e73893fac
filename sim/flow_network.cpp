#include "sim/flow_network.h"

#include <algorithm>
#include <utility>

namespace shardbook::sim {

namespace {

/// Sums of rates are rounded: a link that is just full is not too small.
constexpr double kRounding = 1e-12;

}  // namespace

FlowUses use_links(std::vector<LinkUse> uses) {
  return std::make_shared<const std::vector<LinkUse>>(std::move(uses));
}

double FlowNetwork::shift_since(const FlowRef& flow) const {
  return flow->is_over ? shifted_s_ - flow->shifted_s : 0;
}

int FlowNetwork::add_link(double bytes_per_s) {
  links_.push_back({bytes_per_s, {}});
  return static_cast<int>(links_.size()) - 1;
}

double FlowNetwork::capacity(int link) const {
  return links_[static_cast<std::size_t>(link)].bytes_per_s;
}

double FlowNetwork::load(int link) const {
  double sum = 0;
  for (const Streams& each : links_[static_cast<std::size_t>(link)].flows) {
    sum += each.flow->rate * each.count;
  }
  return sum;
}

// --- The life of a flow ------------------------------------------------------

FlowRef FlowNetwork::add(const Flow& flow, const FlowRef& after,
                         std::function<void(const FlowRef&)> when_over) {
  const auto state = std::make_shared<FlowState>();
  state->flow = flow;
  state->number = num_flows_++;
  state->when_over = std::move(when_over);
  if (after != nullptr && !after->is_over) {
    after->followers.push_back(state);
  } else {
    const double free_s =
        after == nullptr ? 0 : after->end_s + (shifted_s_ - after->shifted_s);
    begin(state, std::max(flow.ready_s, free_s));
  }
  return state;
}

void FlowNetwork::begin(const FlowRef& flow, double begin_s) {
  flow->begin_s = begin_s;
  if (!flow->uses_links()) {
    finish(flow, begin_s + flow->flow.seconds);
    return;
  }
  const double enters = flow->enters_s();
  flow->left = flow->flow.max_rate * flow->flow.transfer_s;
  flow->since_s = std::max(enters, now_s_);
  // A late flow has been alone until now
  flow->left -= flow->flow.max_rate * (flow->since_s - enters);
  if (flow->left <= 0) {
    finish(flow, begin_s + flow->flow.seconds);
    return;
  }
  push(flow, flow->since_s);
}

void FlowNetwork::enter(const FlowRef& flow) {
  flow->has_entered = true;
  for (const LinkUse& use : *flow->flow.uses) {
    links_[static_cast<std::size_t>(use.link)].flows.push_back(
        {flow.get(), use.streams});
  }
  share({flow.get()});
}

void FlowNetwork::finish(const FlowRef& flow, double end_s) {
  flow->is_over = true;
  flow->end_s = end_s;
  flow->shifted_s = shifted_s_;
  if (flow->has_entered) {
    // Flows on links that were full gain
    std::vector<FlowState*> gainers;
    for (const LinkUse& use : *flow->flow.uses) {
      Link& link = links_[static_cast<std::size_t>(use.link)];
      const bool was_full = !has_enough(link);
      const auto mine = std::find_if(
          link.flows.begin(), link.flows.end(),
          [&](const Streams& each) { return each.flow == flow.get(); });
      if (mine != link.flows.end()) link.flows.erase(mine);
      if (!was_full) continue;
      for (const Streams& each : link.flows) {
        if (each.flow != flow.get()) gainers.push_back(each.flow);
      }
    }
    if (!gainers.empty()) share(gainers);
  }
  if (flow->when_over) std::exchange(flow->when_over, nullptr)(flow);
  for (const FlowRef& next : std::exchange(flow->followers, {})) {
    begin(next, std::max(next->flow.ready_s, end_s));
  }
}

FlowRef FlowNetwork::advance() {
  while (!events_.empty()) {
    std::pop_heap(events_.begin(), events_.end(), is_later);
    const Event event = std::move(events_.back());
    events_.pop_back();
    if (event.version != event.flow->version) continue;
    now_s_ = std::max(now_s_, event.at_s);
    if (event.flow->has_entered) {
      finish(event.flow, event.at_s);
      return event.flow;
    }
    enter(event.flow);
  }
  return nullptr;
}

void FlowNetwork::shift(double seconds) {
  now_s_ += seconds;
  shifted_s_ += seconds;
  std::vector<FlowState*> followers;
  for (Event& event : events_) {
    event.at_s += seconds;
    FlowState& flow = *event.flow;
    if (event.version != flow.version) continue;
    flow.begin_s += seconds;
    flow.since_s += seconds;
    for (const FlowRef& next : flow.followers) followers.push_back(next.get());
  }
  while (!followers.empty()) {
    FlowState& flow = *followers.back();
    followers.pop_back();
    flow.flow.ready_s += seconds;
    for (const FlowRef& next : flow.followers) followers.push_back(next.get());
  }
}

// --- Rates -------------------------------------------------------------------

// False when the flows on the link want more than it carries.
bool FlowNetwork::has_enough(const Link& link) {
  double wanted = 0;
  for (const Streams& each : link.flows) {
    wanted += each.flow->flow.max_rate * each.count;
  }
  return wanted <= link.bytes_per_s * (1 + kRounding);
}

// New rates for these flows and for all that share a full link with them,
// directly or through others. A link that carries all that its flows want
// limits none of them.
void FlowNetwork::share(const std::vector<FlowState*>& seeds) {
  struct Full {
    Link* link = nullptr;
    double left = 0;     // bytes per second
    double streams = 0;  // of flows whose rate is not known yet
  };
  std::vector<FlowState*> flows;
  std::vector<Full> full;
  const auto reach = [&](FlowState* flow) {
    if (!std::exchange(flow->is_rising, true)) flows.push_back(flow);
  };
  for (FlowState* flow : seeds) reach(flow);
  for (std::size_t i = 0; i < flows.size(); ++i) {
    for (const LinkUse& use : *flows[i]->flow.uses) {
      Link& link = links_[static_cast<std::size_t>(use.link)];
      if (link.is_in_share || has_enough(link)) continue;
      link.is_in_share = true;
      full.push_back({&link, link.bytes_per_s, 0});
      for (const Streams& other : link.flows) reach(other.flow);
    }
  }
  for (const Full& each : full) each.link->is_in_share = false;
  std::sort(flows.begin(), flows.end(),
            [](auto* a, auto* b) { return a->number < b->number; });

  // All rates rise together; each round stops those that can rise no further
  while (!flows.empty()) {
    double level = flows.front()->flow.max_rate;
    for (const FlowState* flow : flows) {
      level = std::min(level, flow->flow.max_rate);
    }
    for (Full& each : full) {
      each.streams = 0;
      for (const Streams& other : each.link->flows) {
        if (other.flow->is_rising) each.streams += other.count;
      }
      if (each.streams == 0) continue;
      level = std::min(level, std::max(each.left, 0.0) / each.streams);
    }
    for (FlowState* flow : flows) {
      flow->stops = flow->flow.max_rate <= level * (1 + kRounding);
    }
    for (const Full& each : full) {
      if (each.left > level * each.streams * (1 + kRounding)) continue;
      for (const Streams& other : each.link->flows) {
        if (other.flow->is_rising) other.flow->stops = true;
      }
    }
    for (Full& each : full) {
      for (const Streams& other : each.link->flows) {
        if (!other.flow->is_rising || !other.flow->stops) continue;
        each.left -= std::min(level, other.flow->flow.max_rate) * other.count;
      }
    }
    std::vector<FlowState*> rising;
    for (FlowState* flow : flows) {
      if (!flow->stops) {
        rising.push_back(flow);
        continue;
      }
      flow->is_rising = false;
      const double most = flow->flow.max_rate;
      set_rate(*flow, most <= level * (1 + kRounding) ? most : level);
    }
    flows = std::move(rising);
  }
}

void FlowNetwork::set_rate(FlowState& flow, double rate) {
  if (rate == flow.rate) return;
  flow.left -= flow.rate * (now_s_ - flow.since_s);
  flow.since_s = now_s_;
  flow.rate = rate;
  if (rate < flow.flow.max_rate) flow.has_shared = true;
  ++flow.version;
  push(flow.shared_from_this(), flow.has_shared
                                    ? now_s_ + std::max(flow.left, 0.0) / rate
                                    : flow.begin_s + flow.flow.seconds);
}

// --- Events ------------------------------------------------------------------

bool FlowNetwork::is_later(const Event& a, const Event& b) {
  if (a.at_s != b.at_s) return a.at_s > b.at_s;
  // A flow that ends at some time does not meet one that enters then
  if (a.is_end != b.is_end) return b.is_end;
  return a.number > b.number;
}

void FlowNetwork::push(const FlowRef& flow, double at_s) {
  events_.push_back(
      {at_s, flow->has_entered, flow->number, flow, flow->version});
  std::push_heap(events_.begin(), events_.end(), is_later);
}

}  // namespace shardbook::sim
