#include "chapters/common/run/trace.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>

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

sim::TimelineEvent message_of(const CommRecord& record) {
  sim::TimelineEvent event;
  event.name = comm_name(record);
  event.category = "comm";
  event.queue = "comm " + record.group;
  event.bytes = wire_bytes(record);
  return event;
}

}  // namespace

Trace::Trace(int rank, const Device& device)
    : device_(device), start_s_(clock_s()) {
  timeline_.rank = rank;
}

double Trace::now_s() const { return clock_s() - start_s_; }

// The lowest number that no other thread has an operation in.
int Trace::lane_of(std::thread::id thread) const {
  std::set<int> taken;
  for (const OpenOp& op : open_ops_) {
    if (op.thread == thread) return op.lane;
    taken.insert(op.lane);
  }
  int lane = 1;
  while (taken.count(lane) > 0) ++lane;
  return lane;
}

std::size_t Trace::begin(sim::TimelineEvent event) {
  event.begin_s = event.end_s = now_s();
  timeline_.events.push_back(std::move(event));
  return timeline_.events.size() - 1;
}

void Trace::on_op_begin(const OpEvent& event) {
  if (!is_mine(event)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const std::thread::id thread = std::this_thread::get_id();
  const int lane = lane_of(thread);
  sim::TimelineEvent op;
  op.name = event.name;
  op.category = phase_name(event.phase);
  op.queue = lane == 1 ? "compute" : "compute (" + std::to_string(lane) + ")";
  op.flops = event.flops;
  op.bytes = event.bytes;
  open_ops_.push_back({begin(std::move(op)), thread, lane});
}

// Operations of a thread nest: its latest open one of this name ends.
void Trace::on_op_end(const OpEvent& event) {
  if (!is_mine(event)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const std::thread::id thread = std::this_thread::get_id();
  const auto found =
      std::find_if(open_ops_.rbegin(), open_ops_.rend(), [&](const OpenOp& op) {
        return op.thread == thread &&
               timeline_.events[op.event].name == event.name;
      });
  if (found == open_ops_.rend()) return;
  timeline_.events[found->event].end_s = now_s();
  open_ops_.erase(std::next(found).base());
}

void Trace::on_issue(const CommRecord& record) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_messages_.push_back(begin(message_of(record)));
}

// Messages of one name and group end in the order of their issue.
void Trace::on_complete(const CommRecord& record) {
  std::lock_guard<std::mutex> lock(mutex_);
  const sim::TimelineEvent message = message_of(record);
  const auto found = std::find_if(
      open_messages_.begin(), open_messages_.end(), [&](std::size_t i) {
        const sim::TimelineEvent& event = timeline_.events[i];
        return event.name == message.name && event.queue == message.queue;
      });
  if (found == open_messages_.end()) return;
  timeline_.events[*found].end_s = now_s();
  open_messages_.erase(found);
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
