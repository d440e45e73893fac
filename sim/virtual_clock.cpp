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

void DeviceClock::run(const OpEvent& event, double seconds, double earliest_s) {
  double& free = queue(event.stream);
  const double begin = std::max({free, host_, earliest_s});
  free = begin + seconds;
  if (event.stream == kComputeStream) {
    steps_.back().busy_s += seconds;
    if (event.phase == Phase::kForward) steps_.back().forward_s += seconds;
  }
  if (!records_events_) return;
  TimelineEvent entry;
  entry.name = event.name;
  entry.label = label_;
  entry.category = event.source.defined() ? "copy" : phase_name(event.phase);
  entry.queue = queue_name(event.stream);
  entry.begin_s = begin;
  entry.end_s = free;
  entry.flops = event.flops;
  entry.bytes = event.bytes;
  timeline_.events.push_back(std::move(entry));
}

// Notes why a queue did nothing for a while.
void DeviceClock::hold(int stream, double begin_s, double end_s,
                       const char* category) {
  if (end_s <= begin_s) return;
  const std::string kind = category;
  if (stream == kComputeStream) {
    StepSums& sums = steps_.back();
    if (kind == "exposed") sums.exposed_s += end_s - begin_s;
    if (kind == "bubble") sums.bubble_s += end_s - begin_s;
  }
  if (!records_events_) return;
  TimelineEvent entry;
  entry.name = "wait";
  entry.category = kind;
  entry.queue = queue_name(stream);
  entry.begin_s = begin_s;
  entry.end_s = end_s;
  timeline_.events.push_back(std::move(entry));
}

void DeviceClock::wait_message(int stream, double sent_s, double until_s) {
  const double from = ready(stream);
  if (until_s <= from) return;
  const double sent = std::clamp(sent_s, from, until_s);
  hold(stream, from, sent, "bubble");
  hold(stream, sent, until_s, "exposed");
  if (stream != kComputeStream) passages_.push_back({from, sent, until_s});
  queue(stream) = until_s;
}

void DeviceClock::note_copy(double from_s, double begin_s, double end_s) {
  passages_.push_back({from_s, begin_s, end_s});
}

// The other queue has waited for messages, perhaps, and the time in which it
// did is time in which this one waits for them too.
void DeviceClock::wait_event(int stream, double until_s) {
  const double from = ready(stream);
  if (until_s <= from) return;
  passages_.erase(
      std::remove_if(passages_.begin(), passages_.end(),
                     [&](const Passage& p) { return p.until_s <= from; }),
      passages_.end());
  std::vector<double> borders = {from, until_s};
  for (const Passage& passage : passages_) {
    for (const double at : {passage.from_s, passage.sent_s, passage.until_s}) {
      if (at > from && at < until_s) borders.push_back(at);
    }
  }
  std::sort(borders.begin(), borders.end());
  const auto covered = [&](double at, double Passage::*begin,
                           double Passage::*end) {
    return std::any_of(passages_.begin(), passages_.end(),
                       [&](const Passage& passage) {
                         return passage.*begin <= at && at < passage.*end;
                       });
  };
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    const double middle = (borders[i] + borders[i + 1]) / 2;
    const bool on_wire = covered(middle, &Passage::sent_s, &Passage::until_s);
    const bool missing = covered(middle, &Passage::from_s, &Passage::sent_s);
    hold(stream, borders[i], borders[i + 1],
         on_wire   ? "exposed"
         : missing ? "bubble"
                   : "wait");
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
  // Of one instant, keep the fullest moment and what stays.
  std::vector<MemorySample>& samples = timeline_.memory;
  const MemorySample now = {ready(kComputeStream), bytes_};
  const auto is_now = [&](std::size_t from_end) {
    return samples.size() >= from_end &&
           samples[samples.size() - from_end].time_s == now.time_s;
  };
  if (is_now(2)) samples.pop_back();
  if (is_now(1) && samples.back().total() <= now.total()) samples.pop_back();
  samples.push_back(now);
}

void DeviceClock::begin_steps() {
  for (double& each : queues_) each = 0;
  host_ = 0;
  timeline_.steps = {0};
  timeline_.events.clear();
  timeline_.memory.clear();
  passages_.clear();
  steps_.assign(1, {});
  on_memory(MemoryKind::kParameter, 0);
}

void DeviceClock::end_step(double at_s) {
  for (double& each : queues_) each = at_s;
  host_ = at_s;
  passages_.clear();
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
  sums.forward_s += count * (to.sums.forward_s - from.sums.forward_s);
  sums.exposed_s += count * (to.sums.exposed_s - from.sums.exposed_s);
  sums.bubble_s += count * (to.sums.bubble_s - from.sums.bubble_s);
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
  // At the end of a run without flushes, ranks drain.
  std::size_t step = num_steps - 1;
  while (step > 0 && steps_[step].forward_s == 0) --step;
  if (steps_[step].forward_s == 0) step = num_steps - 1;
  const StepSums& last = steps_[step];
  result.step_s = timeline_.steps[step + 1] - timeline_.steps[step];
  result.exposed_comm_s = last.exposed_s;
  result.bubble_s = last.bubble_s;
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
    entry.label = phase_name(event.phase);
    entry.category = "host";
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
      const double end = other.queue(event.stream) = mine.queue(event.stream);
      from->note_copy(0, end - cost.seconds, end);
      to->note_copy(0, end - cost.seconds, end);
      mine.count_link(model_.link({from->rank(), to->rank()}).name, bytes);
      return;
    }
    const double begin = std::max(
        {from->ready(event.stream), to->ready(event.stream), mine.host()});
    from->wait_message(event.stream, begin, begin);
    to->wait_message(event.stream, begin, begin);
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
  if (event.stream != kComputeStream) {
    const double end = on->queue(event.stream);
    on->note_copy(end - cost.seconds, end - cost.seconds, end);
  }
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
  issuer().wait_event(stream, time_s);
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
  mine.wait_message(stream, begin_s, end_s);
}

void VirtualClock::set_label(const std::string& label) {
  const std::lock_guard<std::mutex> lock(mutex_);
  issuer().set_label(label);
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

ActivityScope::ActivityScope(const std::string& label)
    : clock_(VirtualClock::current()) {
  if (clock_ != nullptr) clock_->set_label(label);
}

ActivityScope::~ActivityScope() {
  if (clock_ != nullptr) clock_->set_label("");
}

ClockScope::ClockScope(const CostModel& model, int rank, int num_recorded_ranks)
    : clock_(model, rank, RankContext::current().device) {
  clock_.main().set_records_events(rank < num_recorded_ranks);
  RankContext::current().add_observer(&clock_);
}

ClockScope::~ClockScope() { RankContext::current().remove_observer(&clock_); }

}  // namespace shardbook::sim
