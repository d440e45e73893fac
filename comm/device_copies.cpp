#include "comm/device_copies.h"

#include "core/context.h"

namespace shardbook {

CopyLedger::Log& CopyLedger::log_of(const Device& device) const {
  for (Log& log : logs_) {
    if (log.device == device) return log;
  }
  logs_.push_back(
      {device, CommLog(static_cast<CommLog::BytesOf>(&bytes_sent)), nullptr});
  return logs_.back();
}

void CopyLedger::run(const DeviceCopy& copy,
                     const std::function<void()>& make_copies) {
  if (copy.devices.size() < 2) {
    make_copies();
    return;
  }
  CommRecord record{.op = copy.op,
                    .group = "devices",
                    .group_size = static_cast<int>(copy.devices.size()),
                    .dtype = copy.dtype,
                    .numel = copy.numel,
                    .root_or_peer = copy.root,
                    .phase = RankContext::current().phase,
                    .label = copy.label};
  std::vector<std::pair<std::shared_ptr<CommObserver>, CommRecord>> observed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < copy.devices.size(); ++i) {
      record.group_rank = static_cast<int>(i);
      record.numel_to_peers = copy.sent[i];
      Log& log = log_of(copy.devices[i]);
      log.log.add(record);
      if (log.observer != nullptr) observed.emplace_back(log.observer, record);
    }
  }
  for (const auto& [observer, seen] : observed) observer->on_issue(seen);
  make_copies();
  for (const auto& [observer, seen] : observed) observer->on_complete(seen);
}

std::vector<CommRecord> CopyLedger::records(const Device& device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return log_of(device).log.records();
}

double CopyLedger::sent_bytes(const Device& device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return log_of(device).log.bytes();
}

void CopyLedger::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Log& log : logs_) log.log.clear();
}

void CopyLedger::set_observer(const Device& device,
                              std::shared_ptr<CommObserver> observer) {
  std::lock_guard<std::mutex> lock(mutex_);
  log_of(device).observer = std::move(observer);
}

double bytes_sent(const CommRecord& record) {
  return static_cast<double>(record.numel_to_peers) *
         static_cast<double>(dtype_bytes(record.dtype));
}

double bytes_sent(const std::vector<CommRecord>& records) {
  double sum = 0;
  for (const CommRecord& record : records) sum += bytes_sent(record);
  return sum;
}

}  // namespace shardbook
