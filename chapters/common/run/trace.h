#pragma once

// A rank's operations and messages in wall time, in the order of their
// beginning.

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "comm/process_group.h"
#include "core/context.h"

namespace shardbook {

struct TraceEvent {
  std::string name;
  std::string category;  ///< "forward", "backward", "optimizer", "comm"
  double begin_s = 0;    ///< since the trace was made
  double end_s = -1;
  double flops = 0;
  double bytes = 0;
};

/// Watches one rank; give it to RankContext::add_observer and
/// ProcessGroup::set_observer. Safe to call from the rank's worker threads.
class Trace : public Observer, public CommObserver {
 public:
  explicit Trace(int rank);

  void on_op_begin(const OpEvent& event) override;
  void on_op_end(const OpEvent& event) override;
  void on_issue(const CommRecord& record) override;
  void on_complete(const CommRecord& record) override;

  int rank() const { return rank_; }
  std::vector<TraceEvent> events() const;
  /// As JSON events of process `rank`: one line each, joined by commas.
  std::string to_json() const;

 private:
  void begin(TraceEvent event);
  void end(const std::string& name, const std::string& category);
  double now_s() const;

  int rank_;
  double start_s_;
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

/// Watches a rank for the lifetime of the scope where --trace asks for it.
class TraceScope {
 public:
  TraceScope(const Options& options, ProcessGroup& world);
  ~TraceScope();
  /// Stops watching; rank 0 writes all ranks' events. Collective.
  void write();

 private:
  void stop();

  const std::string path_;
  ProcessGroup& world_;
  Trace trace_;
  bool is_watching_;
};

/// Writes the ranks' events as a Chrome trace, which Perfetto opens.
void write_chrome_trace(const std::string& path,
                        const std::vector<std::string>& json_by_rank);

}  // namespace shardbook
