#pragma once

// Traces of one process that works on several devices: a track per device.

#include <memory>
#include <string>
#include <vector>

#include "chapters/common/run/trace.h"
#include "comm/device_copies.h"
#include "core/context.h"

namespace shardbook {

/// Sorts operations and copies by device. The context and the ledger that it
/// watches must outlive it; its destructor ends the watch.
class DeviceTraces : public Observer {
 public:
  explicit DeviceTraces(const std::vector<Device>& devices);
  ~DeviceTraces() override;

  /// From now on, sees the operations of `context` and the copies of `ledger`.
  void watch(RankContext& context, CopyLedger& ledger);
  /// Stops watching and writes a Chrome trace.
  void write(const std::string& path);

  void on_op_begin(const OpEvent& event) override;
  void on_op_end(const OpEvent& event) override;

 private:
  void stop();
  Trace* trace_of(const Device& device);

  std::vector<Device> devices_;
  std::vector<std::unique_ptr<Trace>> traces_;
  RankContext* context_ = nullptr;
  CopyLedger* ledger_ = nullptr;
};

}  // namespace shardbook
