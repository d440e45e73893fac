#include "sim/device_clock.h"

#include <algorithm>
#include <string_view>

#include "core/stream.h"

namespace shardbook::sim {
namespace {

const char* queue_name(int stream) {
  return stream == kComputeStream   ? "compute"
         : stream == kUnshardStream ? "unshard"
         : stream == kReduceStream  ? "reduce"
                                    : "copy";
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

double& bytes_of(std::vector<LinkBytes>& links, const std::string& name) {
  for (LinkBytes& link : links) {
    if (link.link == name) return link.bytes;
  }
  links.push_back({name, 0});
  return links.back().bytes;
}

}  // namespace

DeviceClock::DeviceClock(const CostModel& model, int rank, Device device)
    : model_(model), rank_(rank), device_(std::move(device)), queues_(4, 0) {
  timeline_.rank = rank;
  timeline_.steps.push_back(0);
  steps_.emplace_back();
  before_.emplace_back();
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
  timeline_.events.push_back(
      {.name = event.name,
       .label = label_,
       .category = event.source.defined() ? "copy" : phase_name(event.phase),
       .queue = queue_name(event.stream),
       .begin_s = begin,
       .end_s = free,
       .flops = event.flops,
       .bytes = event.bytes});
}

// Records why a queue was idle for a while.
void DeviceClock::hold(int stream, double begin_s, double end_s,
                       const char* category) {
  if (end_s <= begin_s) return;
  const std::string_view kind = category;
  if (stream == kComputeStream) {
    StepSums& sums = steps_.back();
    if (kind == "exposed") sums.exposed_s += end_s - begin_s;
    if (kind == "bubble") sums.bubble_s += end_s - begin_s;
  }
  if (!records_events_) return;
  add({"wait", "", category, queue_name(stream), begin_s, end_s});
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

// The other queue may have waited for messages: during that time this queue
// waits for them, too.
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
  bytes_of(steps_.back().links, link) += bytes;
}

void DeviceClock::on_memory(MemoryKind kind, std::int64_t bytes) {
  bytes_[static_cast<std::size_t>(kind)] += bytes;
  if (!records_events_) return;
  // Keep the fullest and the last sample of one instant.
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

void DeviceClock::set_place(int world_size, std::vector<int> alike) {
  timeline_.world_size = world_size;
  timeline_.alike = std::move(alike);
}

void DeviceClock::begin_steps() {
  for (double& each : queues_) each = 0;
  host_ = 0;
  timeline_ = {.rank = rank_,
               .alike = std::move(timeline_.alike),
               .world_size = timeline_.world_size,
               .events = {},
               .memory = {},
               .steps = {0}};
  passages_.clear();
  steps_.assign(1, {});
  before_.assign(1, {});
  on_memory(MemoryKind::kParameter, 0);
}

void DeviceClock::end_step(double at_s) {
  for (double& each : queues_) each = at_s;
  host_ = at_s;
  passages_.clear();
  timeline_.steps.push_back(at_s);
  steps_.emplace_back();
  before_.push_back({timeline_.events.size(), timeline_.memory.size()});
  leave_out_steps();
}

// Drops many steps at once, and so rarely: each time all later events move.
void DeviceClock::leave_out_steps() {
  const std::size_t end = timeline_.steps.size() - 1;
  const std::size_t gap = kFirstSteps;
  const std::size_t first = timeline_.num_left_out > 0 ? gap + 1 : gap;
  if (end <= first + 2 * kLastSteps) return;
  const auto events_from = [&](std::size_t step) {
    return before_[end].events - before_[step].events;
  };
  if (events_from(first) <= 2 * kLastEvents && end - first <= 2 * kMostSteps) {
    return;
  }
  std::size_t keep = end - kLastSteps;
  while (end - keep < kMostSteps && events_from(keep - 1) <= kLastEvents) {
    --keep;
  }
  // Ranks drain without forwards: the step of the last forward must stay
  const auto has_forward = [](const StepSums& step) {
    return step.forward_s > 0;
  };
  const auto from = steps_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto kept = steps_.begin() + static_cast<std::ptrdiff_t>(keep);
  if (std::any_of(from, kept, has_forward) &&
      std::none_of(kept, steps_.end(), has_forward)) {
    return;
  }

  // One entry replaces the steps that are left out, and one sample the memory
  // in use after them
  const Counts old = before_[gap], now = before_[keep];
  std::size_t samples = std::min(now.samples, timeline_.memory.size());
  samples = samples > old.samples ? samples - 1 : old.samples;
  const auto erase = [](auto& list, std::size_t begin, std::size_t end) {
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(begin),
               list.begin() + static_cast<std::ptrdiff_t>(end));
  };
  erase(timeline_.events, old.events, now.events);
  erase(timeline_.memory, old.samples, samples);
  for (std::size_t i = keep; i <= end; ++i) {
    before_[i].events -= now.events - old.events;
    before_[i].samples -= samples - old.samples;
  }
  timeline_.first_left_out = gap;
  timeline_.num_left_out += static_cast<std::int64_t>(keep - first);
  steps_[gap] = {};
  erase(timeline_.steps, gap + 1, keep);
  erase(steps_, gap + 1, keep);
  erase(before_, gap + 1, keep);
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
  std::vector<LinkBytes> before = from.sums.links;
  for (const LinkBytes& each : to.sums.links) {
    bytes_of(sums.links, each.link) +=
        count * (each.bytes - bytes_of(before, each.link));
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
  // The sum of all operations may differ from the step in the last bit
  if (result.step_s > 0) {
    result.idle_share = std::max(0.0, 1 - last.busy_s / result.step_s);
  }
  return result;
}

}  // namespace shardbook::sim
