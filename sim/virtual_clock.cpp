#include "sim/virtual_clock.h"

#include <algorithm>

#include "core/stream.h"

namespace shardbook::sim {

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

// The calling thread feeds the device of its context.
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
    // The host computes, on results of the current stream.
    const Cost cost = model_.operation(event, /*on_host=*/true);
    note(cost.trust);
    const double begin = mine.ready(event.stream);
    mine.host() = begin + cost.seconds;
    mine.add({event.name, phase_name(event.phase), "host", "host", begin,
              mine.host(), event.flops, event.bytes});
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
  // The event counts source and destination; only one of them crosses.
  const double bytes = event.bytes / 2;
  if (from != nullptr && to != nullptr) {
    const Cost cost = model_.message(bytes, from->rank(), to->rank());
    note(cost.trust);
    if (event.stream == kCopyStream) {
      // One side copies while the other goes on and learns of the data's
      // arrival from an event: only the queues of copies meet.
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
    // The threads that feed the two devices have met.
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

void VirtualClock::on_event_record(int stream, EventTime& time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  time = {issuer().ready(stream), epoch_};
}

void VirtualClock::on_event_wait(int stream, const EventTime& time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (time.epoch == epoch_) issuer().wait_event(stream, time.s);
}

void VirtualClock::on_event_synchronize(const EventTime& time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (time.epoch != epoch_) return;
  DeviceClock& mine = issuer();
  mine.host() = std::max(mine.host(), time.s);
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
  count_message(link, event.bytes, trust);
  add_event(std::move(event));
}

void VirtualClock::count_message(const std::string& link, double bytes,
                                 Trust trust) {
  const std::lock_guard<std::mutex> lock(mutex_);
  note(trust);
  devices_.front()->count_link(link, bytes);
}

void VirtualClock::add_event(TimelineEvent event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_.front()->add(std::move(event));
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
  ++num_skips_;
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
  for (const auto& observer : context->observers()) {
    if (auto* clock = dynamic_cast<VirtualClock*>(observer.get())) return clock;
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

ClockScope::ClockScope(const CostModel& model, int rank, bool records_events)
    : clock_(std::make_shared<VirtualClock>(model, rank,
                                            RankContext::current().device)) {
  clock_->main().set_records_events(records_events);
  RankContext::current().add_observer(clock_);
}

ClockScope::~ClockScope() { RankContext::current().remove_observer(clock_); }

}  // namespace shardbook::sim
