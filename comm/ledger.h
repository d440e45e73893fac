#pragma once

// The communication ledger: one record per call and rank, on every backend.
// Bytes on the wire follow from the records by a fixed cost model (they are
// not measured), so that a test can assert them exactly. In a long run the
// ledger keeps the first and the last records, and the sums of all.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/dtype.h"

namespace shardbook {

enum class CommOp {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kScatter,
  kGather,
  kAllToAll,
  kAllToAllV,
  kSend,
  kRecv,
  kBarrier
};
/// "all_reduce", "reduce_scatter", ..., in the order above.
const char* comm_op_name(CommOp op);

struct CommRecord {
  CommOp op = CommOp::kBarrier;
  std::string group;  ///< name of the process group
  int group_size = 1;
  int group_rank = 0;
  DType dtype = DType::kF32;
  /// all_reduce, broadcast, reduce: the buffer. reduce_scatter: the INPUT.
  /// all_gather: the OUTPUT. scatter, gather: the FULL length at the root.
  /// all_to_all: the LOCAL input. all_to_all_v: the sum of send counts. send,
  /// recv: the message.
  std::int64_t numel = 0;
  /// all_to_all_v and copies between devices: the elements for other ranks.
  std::int64_t numel_to_peers = 0;
  int root_or_peer = -1;  ///< group rank; -1 where there is none
  Phase phase = Phase::kForward;
  std::string label;
};

/// Elements this rank puts on the wire, by the cost model:
///
///   all_reduce                 2 (P-1)/P n
///   reduce_scatter, all_gather   (P-1)/P n
///   broadcast, reduce            (P-1)/P n     (average over the group)
///   scatter, gather              (P-1)/P n at the root, 0 elsewhere
///   all_to_all                   (P-1)/P n
///   all_to_all_v               counts to other ranks
///   send                       n;  recv, barrier 0
double wire_elements(const CommRecord& record);
/// wire_elements times the size of an element.
double wire_bytes(const CommRecord& record);
double wire_bytes(const std::vector<CommRecord>& records);

/// Calls in the order of their issue.
class CommLog {
 public:
  using BytesOf = double (*)(const CommRecord&);
  /// The first records are kept, and at least as many of the last.
  static constexpr std::size_t kKept = 4096;

  /// `bytes_of` returns the bytes of one record.
  explicit CommLog(BytesOf bytes_of) : bytes_of_(bytes_of) {}

  void add(const CommRecord& record);
  void clear();
  /// All records; of more than 3 kKept, only the first and the last.
  const std::vector<CommRecord>& records() const { return records_; }
  /// Number and bytes of all calls, kept or not.
  std::int64_t num_calls() const { return num_calls_; }
  double bytes() const { return bytes_; }

  /// A point in the log.
  struct Mark {
    std::int64_t num_calls = 0;
    double bytes = 0;
  };
  Mark mark() const { return {num_calls_, bytes_}; }
  /// Adds the calls since `mark` `times` times more.
  void repeat(const Mark& mark, std::int64_t times);

 private:
  void keep(const CommRecord& record);

  BytesOf bytes_of_;
  std::vector<CommRecord> records_;
  std::int64_t num_calls_ = 0;
  double bytes_ = 0;
};

/// "all_reduce f32[1000] over dp (rank 0 of 4) 'bucket 0'"
std::string record_text(const CommRecord& record);

}  // namespace shardbook
