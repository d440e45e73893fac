#pragma once

// A rank's operations and messages in wall time, in the order of their
// beginning.

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "chapters/common/run/options.h"
#include "comm/device_copies.h"
#include "comm/process_group.h"
#include "core/context.h"
#include "sim/timeline.h"

namespace shardbook {

/// Watches one rank; give it to RankContext::add_observer and
/// ProcessGroup::set_observer. Safe to call from the rank's worker threads.
///
/// Operations are on the queue "compute", and on "compute (2)", ... where
/// several threads compute at once. Messages are on the queue of their group,
/// "comm world".
class Trace : public Observer, public CommObserver {
 public:
  /// With a device, operations of other devices do not count.
  explicit Trace(int rank, const Device& device = {});

  void on_op_begin(const OpEvent& event) override;
  void on_op_end(const OpEvent& event) override;
  void on_issue(const CommRecord& record) override;
  void on_complete(const CommRecord& record) override;

  /// Seconds since the trace was made. An open event ends where it begins.
  sim::RankTimeline timeline() const;

 private:
  bool is_mine(const OpEvent& event) const {
    return !device_.defined() || device_ == event.device;
  }
  struct OpenOp {
    std::size_t event;
    std::thread::id thread;
    int lane;
  };
  int lane_of(std::thread::id thread) const;
  /// Returns the place of the event.
  std::size_t begin(sim::TimelineEvent event);
  double now_s() const;

  const Device device_;
  const double start_s_;
  mutable std::mutex mutex_;
  sim::RankTimeline timeline_;
  // What has not ended, in the order of its beginning
  std::vector<OpenOp> open_ops_;
  std::vector<std::size_t> open_messages_;
};

/// Watches for the lifetime of the scope where --trace asks for it: a rank, or
/// the devices of a process that works on several, each on a track of its own.
/// The current context, the group and the ledger must outlive it.
class TraceScope {
 public:
  TraceScope(const Options& options, ProcessGroup& world);
  TraceScope(const Options& options, const std::vector<Device>& devices,
             CopyLedger& copies);
  ~TraceScope();
  /// Stops watching; rank 0 writes all ranks' events as a Chrome trace, which
  /// Perfetto opens. Collective.
  void write();

 private:
  void watch(int rank, const Device& device);
  /// Shows messages (of device i, if of one process) to `trace`; null: stops.
  void show_messages(std::size_t i, const std::shared_ptr<Trace>& trace);
  void stop();

  const std::string path_;
  RankContext& context_ = RankContext::current();
  ProcessGroup* const world_ = nullptr;
  CopyLedger* const copies_ = nullptr;
  const std::vector<Device> devices_;
  std::vector<std::shared_ptr<Trace>> traces_;  ///< empty: nothing is watched
};

}  // namespace shardbook
