#pragma once

// The ledger of the copies between the devices of one process.
//
// There is no process group here: one thread copies from device to device. Its
// copies are recorded as the equivalent collectives, one record per device that
// takes part:
//
//   scatter, gather    numel is the FULL length; the pieces may be uneven
//   broadcast, reduce  numel is the buffer; the main device is the root
//
// `CommRecord::numel_to_peers` counts exactly what the device sends: the root
// of a broadcast sends n - 1 copies, the others nothing. (The cost model of
// comm/ledger.h spreads a broadcast evenly over its group, as a ring would; the
// totals over the group are the same wherever pieces are even.)

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "core/device.h"

namespace shardbook {

/// One collective among devices.
struct DeviceCopy {
  CommOp op = CommOp::kBroadcast;
  std::vector<Device> devices;  ///< by group rank
  int root = 0;                 ///< position in `devices`
  DType dtype = DType::kF32;
  std::int64_t numel = 0;
  std::vector<std::int64_t> sent;  ///< elements that each device sends
  std::string label;
};

/// Safe to use from several threads: forward and backward copy from the threads
/// that they run on.
class CopyLedger {
 public:
  /// Makes the copies and one record on each device. A group of one device
  /// records nothing.
  void run(const DeviceCopy& copy, const std::function<void()>& make_copies);

  /// The copies that `device` took part in, in order; of a long run, only the
  /// first and the last (see CommLog).
  std::vector<CommRecord> records(const Device& device) const;
  /// Bytes that `device` sent in all copies.
  double sent_bytes(const Device& device) const;
  void clear();
  /// Shows the records of `device` to `observer` (null: stops). Copies that run
  /// meanwhile own theirs.
  void set_observer(const Device& device,
                    std::shared_ptr<CommObserver> observer);

 private:
  struct Log {
    Device device;
    CommLog log;
    std::shared_ptr<CommObserver> observer;
  };
  Log& log_of(const Device& device) const;

  mutable std::mutex mutex_;
  mutable std::vector<Log> logs_;  // made when a device is first asked for
};

using SharedLedger = std::shared_ptr<CopyLedger>;

/// Bytes that a device sent to others, exactly.
double bytes_sent(const CommRecord& record);
double bytes_sent(const std::vector<CommRecord>& records);

}  // namespace shardbook
