#include "chapters/common/run/trace.h"

#include <chrono>

#include "sim/chrome_trace.h"

namespace shardbook {
namespace {

double clock_s() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string comm_name(const CommRecord& record) {
  std::string name = comm_op_name(record.op);
  if (!record.label.empty()) name += " " + record.label;
  return name;
}

sim::TimelineEvent event_of(const std::string& name,
                            const std::string& category, double flops,
                            double bytes) {
  sim::TimelineEvent event;
  event.name = name;
  event.category = category;
  event.queue = category == "comm" ? "communication" : "compute";
  event.flops = flops;
  event.bytes = bytes;
  return event;
}

}  // namespace

Trace::Trace(int rank, const Device& device)
    : device_(device), start_s_(clock_s()) {
  timeline_.rank = rank;
}

double Trace::now_s() const { return clock_s() - start_s_; }

void Trace::begin(sim::TimelineEvent event) {
  std::lock_guard<std::mutex> lock(mutex_);
  event.begin_s = event.end_s = now_s();
  open_.push_back(timeline_.events.size());
  timeline_.events.push_back(std::move(event));
}

// Ends the latest open event of this name: operations nest. Messages of one
// name end in the order of their issue.
void Trace::end(const std::string& name, const std::string& category) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t found = open_.size();
  for (std::size_t i = 0; i < open_.size(); ++i) {
    const sim::TimelineEvent& event = timeline_.events[open_[i]];
    if (event.name != name || event.category != category) continue;
    found = i;
    if (category == "comm") break;
  }
  if (found == open_.size()) return;
  timeline_.events[open_[found]].end_s = now_s();
  open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(found));
}

void Trace::on_op_begin(const OpEvent& event) {
  if (!is_mine(event)) return;
  begin(
      event_of(event.name, phase_name(event.phase), event.flops, event.bytes));
}

void Trace::on_op_end(const OpEvent& event) {
  if (is_mine(event)) end(event.name, phase_name(event.phase));
}

void Trace::on_issue(const CommRecord& record) {
  begin(event_of(comm_name(record), "comm", 0, wire_bytes(record)));
}

void Trace::on_complete(const CommRecord& record) {
  end(comm_name(record), "comm");
}

sim::RankTimeline Trace::timeline() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return timeline_;
}

TraceScope::TraceScope(const Options& options, ProcessGroup& world)
    : path_(options.trace), world_(&world) {
  if (!path_.empty()) watch(world.rank(), {});
}

TraceScope::TraceScope(const Options& options,
                       const std::vector<Device>& devices, CopyLedger& copies)
    : path_(options.trace), copies_(&copies), devices_(devices) {
  if (path_.empty()) return;
  for (const Device& device : devices) {
    watch(static_cast<int>(traces_.size()), device);
  }
}

TraceScope::~TraceScope() { stop(); }

void TraceScope::watch(int rank, const Device& device) {
  traces_.push_back(std::make_shared<Trace>(rank, device));
  context_.add_observer(traces_.back());
  show_messages(traces_.size() - 1, traces_.back());
}

void TraceScope::show_messages(std::size_t i,
                               const std::shared_ptr<Trace>& trace) {
  if (world_ != nullptr) {
    world_->set_observer(trace);
  } else {
    copies_->set_observer(devices_[i], trace);
  }
}

void TraceScope::stop() {
  for (std::size_t i = 0; i < traces_.size(); ++i) {
    context_.remove_observer(traces_[i]);
    show_messages(i, nullptr);
  }
  traces_.clear();
}

void TraceScope::write() {
  if (path_.empty()) return;
  std::vector<sim::RankTimeline> timelines;
  for (const auto& trace : traces_) timelines.push_back(trace->timeline());
  stop();
  if (world_ == nullptr) {
    sim::write_chrome_trace(path_, timelines);
    return;
  }
  const std::vector<std::string> events =
      world_->collect(sim::chrome_events(timelines.at(0)));
  if (world_->rank() == 0) sim::write_chrome_trace(path_, events);
}

}  // namespace shardbook
