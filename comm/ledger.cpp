#include "comm/ledger.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardbook {

const char* comm_op_name(CommOp op) {
  constexpr const char* kNames[] = {
      "all_reduce",   "reduce_scatter", "all_gather", "broadcast",
      "reduce",       "scatter",        "gather",     "all_to_all",
      "all_to_all_v", "send",           "recv",       "barrier"};
  return kNames[static_cast<std::size_t>(op)];
}

double wire_elements(const CommRecord& record) {
  const double n = static_cast<double>(record.numel);
  // Not n * ((P-1) / P): (P-1) n / P is exact whenever the result is whole.
  const double share = (record.group_size - 1) * n / record.group_size;
  switch (record.op) {
    case CommOp::kAllReduce:
      return 2 * share;
    case CommOp::kReduceScatter:
    case CommOp::kAllGather:
    case CommOp::kBroadcast:
    case CommOp::kReduce:
    case CommOp::kAllToAll:
      return share;
    case CommOp::kScatter:
    case CommOp::kGather:
      return record.group_rank == record.root_or_peer ? share : 0;
    case CommOp::kAllToAllV:
      return static_cast<double>(record.numel_to_peers);
    case CommOp::kSend:
      return n;
    default:
      return 0;
  }
}

double wire_bytes(const CommRecord& record) {
  return wire_elements(record) * static_cast<double>(dtype_bytes(record.dtype));
}

double wire_bytes(const std::vector<CommRecord>& records) {
  double sum = 0;
  for (const CommRecord& record : records) sum += wire_bytes(record);
  return sum;
}

void CommLog::add(const CommRecord& record) {
  ++num_calls_;
  bytes_ += bytes_of_(record);
  keep(record);
}

void CommLog::clear() {
  records_.clear();
  num_calls_ = 0;
  bytes_ = 0;
}

void CommLog::keep(const CommRecord& record) {
  records_.push_back(record);
  // Erase rarely: it moves all later records
  if (records_.size() <= 3 * kKept) return;
  const auto begin = records_.begin() + static_cast<std::ptrdiff_t>(kKept);
  records_.erase(begin, begin + static_cast<std::ptrdiff_t>(kKept));
}

void CommLog::repeat(const Mark& mark, std::int64_t times) {
  const std::int64_t count = num_calls_ - mark.num_calls;
  const double bytes = bytes_ - mark.bytes;
  num_calls_ += times * count;
  for (std::int64_t k = 0; k < times; ++k) bytes_ += bytes;
  // Repeat the kept records only as often as the log can hold them
  const auto last =
      std::min<std::int64_t>(count, static_cast<std::int64_t>(kKept));
  const std::vector<CommRecord> body(records_.end() - last, records_.end());
  if (body.empty()) return;
  const std::int64_t most = 3 * static_cast<std::int64_t>(kKept) / last + 1;
  for (std::int64_t k = 0; k < std::min(times, most); ++k) {
    for (const CommRecord& each : body) keep(each);
  }
}

std::string record_text(const CommRecord& record) {
  std::string text = comm_op_name(record.op);
  if (record.op != CommOp::kBarrier) {
    text += fmt::format(" {}[{}]", dtype_name(record.dtype), record.numel);
  }
  text += fmt::format(" over {} (rank {} of {})", record.group,
                      record.group_rank, record.group_size);
  return record.label.empty() ? text : text + " '" + record.label + "'";
}

}  // namespace shardbook
