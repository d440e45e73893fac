#include "sim/flow_network.h"

#include <algorithm>
#include <utility>

namespace shardbook::sim {

class FlowState : public std::enable_shared_from_this<FlowState> {
 public:
  Flow flow;
  std::uint64_t number = 0;
  std::function<void(const FlowRef&)> when_over;
  /// Flows that begin when this one ends.
  std::vector<FlowRef> followers;
  double begin_s = 0, end_s = 0;
  double shifted_s = 0;  ///< by how much the network had shifted at its end
  bool has_entered = false, is_over = false;
  /// It has had to share: its end is no longer begin plus `seconds`.
  bool has_shared = false;
  double rate = 0;     ///< bytes per second of each stream
  double left = 0;     ///< bytes of each stream at `since_s`
  double since_s = 0;  ///< when `rate` began
  int version = 0;     ///< of its event: older events count no more
  bool is_in_share = false;

  double enters_s() const { return begin_s + (flow.seconds - flow.transfer_s); }
  bool uses_links() const {
    return flow.uses != nullptr && !flow.uses->empty() && flow.transfer_s > 0;
  }
};

namespace {

/// Sums of rates are rounded: a link that is just full is not too small.
constexpr double kRounding = 1e-12;

double streams_on(const FlowState& flow, int link) {
  double streams = 0;
  for (const LinkUse& use : *flow.flow.uses) {
    if (use.link == link) streams += use.streams;
  }
  return streams;
}

}  // namespace

FlowUses use_links(std::vector<LinkUse> uses) {
  return std::make_shared<const std::vector<LinkUse>>(std::move(uses));
}

FlowNetwork::FlowNetwork() = default;
FlowNetwork::~FlowNetwork() = default;

bool FlowNetwork::is_over(const FlowRef& flow) { return flow->is_over; }
double FlowNetwork::begin_s(const FlowRef& flow) { return flow->begin_s; }
double FlowNetwork::end_s(const FlowRef& flow) { return flow->end_s; }
bool FlowNetwork::is_under_way(const FlowRef& flow) {
  return flow->has_entered && !flow->is_over;
}
double FlowNetwork::rate(const FlowRef& flow) { return flow->rate; }

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
  for (const FlowState* flow : links_[static_cast<std::size_t>(link)].flows) {
    sum += flow->rate * streams_on(*flow, link);
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
    links_[static_cast<std::size_t>(use.link)].flows.push_back(flow.get());
  }
  share({flow.get()});
}

void FlowNetwork::finish(const FlowRef& flow, double end_s) {
  flow->is_over = true;
  flow->end_s = end_s;
  flow->shifted_s = shifted_s_;
  if (flow->has_entered) {
    // Flows gain where they did not have all that they wanted
    std::vector<FlowState*> gainers;
    for (const LinkUse& use : *flow->flow.uses) {
      Link& link = links_[static_cast<std::size_t>(use.link)];
      const bool was_full = !is_wanted_in_full(link);
      const auto mine =
          std::find(link.flows.begin(), link.flows.end(), flow.get());
      if (mine != link.flows.end()) link.flows.erase(mine);
      if (was_full) {
        gainers.insert(gainers.end(), link.flows.begin(), link.flows.end());
      }
    }
    gainers.erase(std::remove(gainers.begin(), gainers.end(), flow.get()),
                  gainers.end());
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
bool FlowNetwork::is_wanted_in_full(const Link& link) const {
  const int number = static_cast<int>(&link - links_.data());
  double wanted = 0;
  for (const FlowState* flow : link.flows) {
    wanted += flow->flow.max_rate * streams_on(*flow, number);
  }
  return wanted <= link.bytes_per_s * (1 + kRounding);
}

// New rates for these flows and for all that share a full link with them,
// directly or through others. Links that carry all that is wanted of them bind
// nobody.
void FlowNetwork::share(const std::vector<FlowState*>& seeds) {
  struct Full {
    int number = 0;
    double left = 0;     // bytes per second
    double streams = 0;  // of flows whose rate is not known yet
  };
  std::vector<FlowState*> flows;
  std::vector<Full> full;
  const auto reach = [&](FlowState* flow) {
    if (std::exchange(flow->is_in_share, true)) return;
    flows.push_back(flow);
  };
  for (FlowState* flow : seeds) reach(flow);
  for (std::size_t i = 0; i < flows.size(); ++i) {
    for (const LinkUse& use : *flows[i]->flow.uses) {
      const Link& link = links_[static_cast<std::size_t>(use.link)];
      if (is_wanted_in_full(link)) continue;
      if (std::any_of(full.begin(), full.end(), [&](const Full& each) {
            return each.number == use.link;
          })) {
        continue;
      }
      full.push_back({use.link, link.bytes_per_s, 0});
      for (FlowState* other : link.flows) reach(other);
    }
  }
  for (FlowState* flow : flows) flow->is_in_share = false;
  std::sort(flows.begin(), flows.end(),
            [](auto* a, auto* b) { return a->number < b->number; });

  // All rates rise together; each round fixes those that stop first
  while (!flows.empty()) {
    double level = flows.front()->flow.max_rate;
    for (const FlowState* flow : flows) {
      level = std::min(level, flow->flow.max_rate);
    }
    for (Full& link : full) {
      link.streams = 0;
      for (const FlowState* flow : flows) {
        link.streams += streams_on(*flow, link.number);
      }
      if (link.streams > 0) {
        level = std::min(level, std::max(link.left, 0.0) / link.streams);
      }
    }
    const auto stops = [&](const FlowState* flow) {
      if (flow->flow.max_rate <= level * (1 + kRounding)) return true;
      return std::any_of(full.begin(), full.end(), [&](const Full& link) {
        return link.left <= level * link.streams * (1 + kRounding) &&
               streams_on(*flow, link.number) > 0;
      });
    };
    std::vector<FlowState*> rising, stopped;
    for (FlowState* flow : flows) {
      (stops(flow) ? stopped : rising).push_back(flow);
    }
    for (FlowState* flow : stopped) {
      const double most = flow->flow.max_rate;
      set_rate(*flow, most <= level * (1 + kRounding) ? most : level);
      for (Full& link : full) {
        link.left -= flow->rate * streams_on(*flow, link.number);
      }
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
