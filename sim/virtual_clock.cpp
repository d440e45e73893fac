#include "sim/virtual_clock.h"

#include <algorithm>

#include "core/check.h"
#include "core/stream.h"

namespace shardbook::sim {
namespace {

const char* queue_name(int stream) {
  switch (stream) {
    case kComputeStream:
      return "compute";
    case kUnshardStream:
      return "unshard";
    case kReduceStream:
      return "reduce";
    default:
      return "copy";
  }
}

// A number in [0, 1) that depends on its three keys only (splitmix64).
double draw(std::uint64_t seed, std::uint64_t rank, std::uint64_t index) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + rank * 0xBF58476D1CE4E5B9u +
                    index * 0x94D049BB133111EBu;
  for (const int shift : {30, 27, 31}) {
    x = (x ^ (x >> shift)) * 0xD6E8FEB86659FD93u;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

void add_link(std::vector<LinkBytes>& links, const std::string& name,
              double bytes) {
  for (LinkBytes& link : links) {
    if (link.link == name) {
      link.bytes += bytes;
      return;
    }
  }
  links.push_back({name, bytes});
}

}  // namespace

// --- One device --------------------------------------------------------------

DeviceClock::DeviceClock(const CostModel& model, int rank, Device device)
    : model_(model), rank_(rank), device_(std::move(device)), queues_(4, 0) {
  timeline_.rank = rank;
  timeline_.steps.push_back(0);
  steps_.emplace_back();
}

double& DeviceClock::queue(int stream) {
  const auto index = static_cast<std::size_t>(stream);
  if (index >= queues_.size()) queues_.resize(index + 1, 0);
  return queues_[index];
}

double DeviceClock::ready(int stream) const {
  const auto index = static_cast<std::size_t>(stream);
  return std::max(host_, index < queues_.size() ? queues_[index] : 0.0);
}

double DeviceClock::now() const {
  return std::max(host_, *std::max_element(queues_.begin(), queues_.end()));
}

double DeviceClock::slowdown() {
  const Cluster& cluster = model_.cluster();
  double factor = model_.compute_slowdown(rank_);
  if (cluster.jitter > 0) {
    factor *= 1 + cluster.jitter * draw(cluster.jitter_seed,
                                        static_cast<std::uint64_t>(rank_),
                                        num_ops_++);
  }
  return factor;
}

void DeviceClock::run(const OpEvent& event, double seconds,
                      double earliest_s) {
  double& free = queue(event.stream);
  const double begin = std::max({free, host_, earliest_s});
  free = begin + seconds;
  if (event.stream == kComputeStream) steps_.back().busy_s += seconds;
  if (!records_events_) return;
  TimelineEvent entry;
  entry.name = event.name;
  entry.category =
      event.source.defined() ? "copy" : phase_name(event.phase);
  entry.queue = queue_name(event.stream);
  entry.begin_s = begin;
  entry.end_s = free;
  entry.flops = event.flops;
  entry.bytes = event.bytes;
  timeline_.events.push_back(std::move(entry));
}

void DeviceClock::wait(int stream, double until_s, bool is_message) {
  const double from = ready(stream);
  if (until_s <= from) return;
  if (is_message && stream == kComputeStream) {
    steps_.back().exposed_s += until_s - from;
  }
  queue(stream) = until_s;
}

void DeviceClock::add(TimelineEvent event) {
  if (records_events_) timeline_.events.push_back(std::move(event));
}

void DeviceClock::count_link(const std::string& link, double bytes) {
  add_link(steps_.back().links, link, bytes);
}

void DeviceClock::on_memory(MemoryKind kind, std::int64_t bytes) {
  bytes_[static_cast<std::size_t>(kind)] += bytes;
  if (!records_events_) return;
  const double time = ready(kComputeStream);
  if (timeline_.memory.empty() || timeline_.memory.back().time_s != time) {
    timeline_.memory.push_back({time, {}});
  }
  timeline_.memory.back().bytes = bytes_;
}

void DeviceClock::begin_steps() {
  for (double& each : queues_) each = 0;
  host_ = 0;
  timeline_.steps = {0};
  timeline_.events.clear();
  timeline_.memory.clear();
  steps_.assign(1, {});
  on_memory(MemoryKind::kParameter, 0);
}

void DeviceClock::end_step(double at_s) {
  for (double& each : queues_) each = at_s;
  host_ = at_s;
  timeline_.steps.push_back(at_s);
  steps_.emplace_back();
}

DeviceClock::State DeviceClock::state() const {
  State state = {queues_, steps_.back()};
  state.times.push_back(host_);
  return state;
}

void DeviceClock::advance(const State& from, const State& to,
                          std::int64_t times) {
  const auto count = static_cast<double>(times);
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    queues_[i] += count * (to.times[i] - from.times[i]);
  }
  host_ += count * (to.times.back() - from.times.back());
  StepSums& sums = steps_.back();
  sums.busy_s += count * (to.sums.busy_s - from.sums.busy_s);
  sums.exposed_s += count * (to.sums.exposed_s - from.sums.exposed_s);
  for (const LinkBytes& link : to.sums.links) {
    double before = 0;
    for (const LinkBytes& each : from.sums.links) {
      if (each.link == link.link) before = each.bytes;
    }
    add_link(sums.links, link.link, count * (link.bytes - before));
  }
}

TimeSummary DeviceClock::summary() const {
  TimeSummary result;
  const std::size_t num_steps = timeline_.steps.size() - 1;
  if (num_steps == 0) return result;
  const StepSums& last = steps_[num_steps - 1];
  result.step_s = timeline_.steps[num_steps] - timeline_.steps[num_steps - 1];
  result.exposed_comm_s = last.exposed_s;
  result.links = last.links;
  if (result.step_s > 0) result.idle_share = 1 - last.busy_s / result.step_s;
  return result;
}

// --- A rank ------------------------------------------------------------------

VirtualClock::VirtualClock(const CostModel& model, int rank,
                           const Device& device)
    : model_(model) {
  add_device(device, rank);
}

void VirtualClock::add_device(const Device& device, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (find(device) != nullptr) return;
  devices_.push_back(std::make_unique<DeviceClock>(model_, rank, device));
}

DeviceClock* VirtualClock::find(const Device& device) {
  for (const auto& each : devices_) {
    if (each->device() == device) return each.get();
  }
  return nullptr;
}

// The thread that calls feeds the device of its context.
DeviceClock& VirtualClock::issuer() {
  DeviceClock* found = find(RankContext::current().device);
  return found != nullptr ? *found : *devices_.front();
}

void VirtualClock::note(Trust trust) { trust_ = std::max(trust_, trust); }

void VirtualClock::on_op_begin(const OpEvent& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClock& mine = issuer();
  if (event.source.defined()) {
    transfer(event);
    return;
  }
  DeviceClock* on = find(event.device);
  if (on == nullptr) {
    // The host computes, with what the current stream has brought it.
    const Cost cost = model_.operation(event, /*on_host=*/true);
    note(cost.trust);
    const double begin = mine.ready(event.stream);
    mine.host() = begin + cost.seconds;
    TimelineEvent entry;
    entry.name = event.name;
    entry.category = phase_name(event.phase);
    entry.queue = "host";
    entry.begin_s = begin;
    entry.end_s = mine.host();
    entry.flops = event.flops;
    entry.bytes = event.bytes;
    mine.add(std::move(entry));
    return;
  }
  const Cost cost = model_.operation(event);
  note(cost.trust);
  mine.host() += model_.cluster().device.launch_s;
  on->run(event, cost.seconds * on->slowdown(), mine.host());
}

void VirtualClock::transfer(const OpEvent& event) {
  DeviceClock& mine = issuer();
  mine.host() += model_.cluster().device.launch_s;
  DeviceClock* from = find(event.source);
  DeviceClock* to = find(event.device);
  // Each operand was counted once; one of them crosses.
  const double bytes = event.bytes / 2;
  if (from != nullptr && to != nullptr) {
    const Cost cost = model_.message(bytes, from->rank(), to->rank());
    note(cost.trust);
    if (event.stream == kCopyStream) {
      // One side copies while the other goes on, and learns from an event when
      // the data are there: only the queues of copies meet.
      DeviceClock& other = from == &mine ? *to : *from;
      const double free = other.queue(event.stream);
      mine.run(event, cost.seconds, free);
      other.queue(event.stream) = mine.queue(event.stream);
      mine.count_link(model_.link({from->rank(), to->rank()}).name, bytes);
      return;
    }
    const double begin = std::max({from->ready(event.stream),
                                   to->ready(event.stream), mine.host()});
    from->run(event, cost.seconds, begin);
    to->run(event, cost.seconds, begin);
    from->count_link(model_.link({from->rank(), to->rank()}).name, bytes);
    // The threads that feed the two have met.
    const double host = std::max(from->host(), to->host());
    from->host() = to->host() = std::max(host, mine.host());
    return;
  }
  DeviceClock* on = from != nullptr ? from : to;
  if (on == nullptr) return;  // within the host
  const Cost cost = model_.host_copy(bytes);
  note(cost.trust);
  on->run(event, cost.seconds);
  on->count_link(model_.cluster().host_link.name, bytes);
}

void VirtualClock::on_allocation(const AllocationEvent& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (DeviceClock* on = find(event.device)) {
    on->on_memory(event.kind, event.bytes);
  }
}

void VirtualClock::on_event_record(int stream, double& time_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  time_s = issuer().ready(stream);
}

void VirtualClock::on_event_wait(int stream, double time_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  issuer().wait(stream, time_s, /*is_message=*/false);
}

void VirtualClock::on_event_synchronize(double time_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClock& mine = issuer();
  mine.host() = std::max(mine.host(), time_s);
}

void VirtualClock::on_host_read(const Device& device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClock* on = find(device);
  if (on == nullptr) return;
  DeviceClock& mine = issuer();
  mine.host() = std::max(mine.host(), on->ready(RankContext::current().stream));
}

double VirtualClock::issue_message() {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClock& mine = issuer();
  mine.host() += model_.cluster().device.launch_s;
  return mine.ready(RankContext::current().stream);
}

void VirtualClock::wait_message(double begin_s, double end_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClock& mine = issuer();
  const int stream = RankContext::current().stream;
  if (model_.cluster().shares_memory) {
    const double hidden = std::min(mine.ready(stream), end_s) - begin_s;
    if (hidden > 0) end_s = std::max(end_s, mine.ready(stream)) + hidden;
  }
  mine.wait(stream, end_s, /*is_message=*/true);
}

void VirtualClock::add_message(TimelineEvent event, const std::string& link,
                               Trust trust) {
  const std::lock_guard<std::mutex> lock(mutex_);
  note(trust);
  DeviceClock& mine = *devices_.front();
  mine.count_link(link, event.bytes);
  mine.add(std::move(event));
}

double VirtualClock::latest() const {
  double latest = 0;
  for (const auto& each : devices_) latest = std::max(latest, each->now());
  return latest;
}

void VirtualClock::begin_steps() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : devices_) each->begin_steps();
  ++epoch_;
}

void VirtualClock::end_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double end = latest();
  for (const auto& each : devices_) each->end_step(end);
}

void VirtualClock::skip(const DeviceClock::State& from,
                        const DeviceClock::State& to, std::int64_t times) {
  const std::lock_guard<std::mutex> lock(mutex_);
  main().advance(from, to, times);
  skipped_s_ += static_cast<double>(times) * (to.times[0] - from.times[0]);
}

double VirtualClock::now_s() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest();
}

double VirtualClock::last_step_s() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<double>& steps = devices_.front()->timeline().steps;
  if (steps.size() < 2) return -1;
  return steps[steps.size() - 1] - steps[steps.size() - 2];
}

VirtualClock* VirtualClock::current() {
  RankContext* context = RankContext::installed();
  if (context == nullptr) return nullptr;
  for (Observer* observer : context->observers()) {
    if (auto* clock = dynamic_cast<VirtualClock*>(observer)) return clock;
  }
  return nullptr;
}

ClockScope::ClockScope(const CostModel& model, int rank,
                       int num_recorded_ranks)
    : clock_(model, rank, RankContext::current().device) {
  clock_.main().set_records_events(rank < num_recorded_ranks);
  RankContext::current().add_observer(&clock_);
}

ClockScope::~ClockScope() { RankContext::current().remove_observer(&clock_); }

}  // namespace shardbook::sim
