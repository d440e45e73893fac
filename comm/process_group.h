#pragma once

// Process groups: the ranks a collective runs over.
//
//   run_ranks(4, [](ProcessGroup& world) {       // comm/launch.h
//     Tensor x = Tensor::full({3}, world.rank());
//     world.all_reduce(x).wait();                // 0 + 1 + 2 + 3 everywhere
//   });
//
// Every call returns a Work; code after its `wait()` may use the buffers.
// Collectives of one group run in the order of their issue, as on one stream;
// different groups are independent, and so are messages (send, recv). All
// members of a group issue the same collectives in the same order; a difference
// in operation, dtype, count, root or order is an Error that names both ranks
// and both calls. Buffers are contiguous and must stay untouched until the Work
// is done. Groups of size one do nothing, cost nothing and record nothing.
//
// A rank that throws, dies or leaves makes every call of the others throw an
// Error "rank 2 failed: ..."; no call waits forever.
//
// Sums add in the order of group ranks 0..P-1 on every backend but nccl, so
// they have the same bits everywhere. NCCL adds in an order of its own, and
// rounds sums of 16 bits at every step.
//
// On CUDA tensors a call of nccl joins the work of the current stream: the host
// does not wait in wait(), and what the caller gives its stream afterwards runs
// after the call. The other backends return from wait() when the data is there.
//
// A group belongs to one rank and is used by one thread at a time. Tensors on
// meta devices are recorded and not moved (in the `sim` world, they take
// virtual time).

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/ledger.h"
#include "comm/work.h"
#include "core/tensor.h"

namespace shardbook {

namespace internal {
class Arguments;
class ObserverSlot;
}  // namespace internal

enum class ReduceOp { kSum, kMax, kMin };

/// The description of one call, also for error messages.
struct CommCall {
  CommOp op = CommOp::kBarrier;
  DType dtype = DType::kF32;
  std::int64_t numel = 0;  ///< as in CommRecord
  int root_or_peer = -1;
  ReduceOp reduce_op = ReduceOp::kSum;
  int tag = 0;
  std::string label;
};

/// The tensors of a call: the same one twice if it works in place, undefined
/// where this rank has none.
struct CommBuffers {
  Tensor output, input;
  /// all_to_all, all_to_all_v: elements to and from each rank.
  std::vector<std::int64_t> send_counts = {}, recv_counts = {};
};

/// Sees each call as it is issued and as it completes (traces, clocks).
class CommObserver {
 public:
  virtual ~CommObserver() = default;
  virtual void on_issue(const CommRecord& record) {}
  /// Called by the thread that waits, when wait() returns.
  virtual void on_complete(const CommRecord& record) {}
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// The name in ledgers and messages: "world", "dp", "tp".
  const std::string& name() const { return name_; }
  /// World rank of each member, by group rank.
  const std::vector<int>& ranks() const { return ranks_; }
  int world_rank(int group_rank) const {
    return ranks_[static_cast<std::size_t>(group_rank)];
  }

  // --- Collectives. All members call them in the same order. ----------------

  /// tensor = op over the ranks' tensors, everywhere, in place.
  Work all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const std::string& label = "");
  /// output [n/P] = piece `rank` of the sum of the ranks' inputs [n]. output
  /// may be exactly that piece of the input (in place).
  Work reduce_scatter(const Tensor& output, const Tensor& input,
                      ReduceOp op = ReduceOp::kSum,
                      const std::string& label = "");
  /// output [n] = the ranks' inputs [n/P] end to end. input may be exactly this
  /// rank's piece of the output (in place).
  Work all_gather(const Tensor& output, const Tensor& input,
                  const std::string& label = "");
  /// tensor = the root's tensor.
  Work broadcast(const Tensor& tensor, int root, const std::string& label = "");
  /// The root's tensor = op over the ranks' tensors; others keep theirs.
  Work reduce(const Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
              const std::string& label = "");
  /// output [n/P] = piece `rank` of the root's input [n] (undefined elsewhere).
  Work scatter(const Tensor& output, const Tensor& input, int root,
               const std::string& label = "");
  /// The root's output [n] (undefined elsewhere) = the ranks' inputs [n/P].
  Work gather(const Tensor& output, const Tensor& input, int root,
              const std::string& label = "");
  /// Piece j of input [n] goes to rank j; output [n] collects by source rank.
  Work all_to_all(const Tensor& output, const Tensor& input,
                  const std::string& label = "");
  /// The same with counts in elements: send_counts[j] to rank j, recv_counts[j]
  /// from rank j, pieces end to end.
  Work all_to_all_v(const Tensor& output, const Tensor& input,
                    const std::vector<std::int64_t>& send_counts,
                    const std::vector<std::int64_t>& recv_counts,
                    const std::string& label = "");
  /// Returns when all members have called it. Adds no bytes to the ledger.
  void barrier(const std::string& label = "");

  // --- Point to point. Matched per (source, destination, tag), in order. -----

  /// Complete when the receiver has the data or the backend has a copy.
  Work send(const Tensor& tensor, int to, int tag = 0,
            const std::string& label = "");
  Work recv(const Tensor& tensor, int from, int tag = 0,
            const std::string& label = "");

  // --- Small values (control, not accounted) ---------------------------------

  /// Whether this rank is rank 0, or runs in its place (sim/world.h).
  virtual bool is_first() const { return rank_ == 0; }
  /// Every rank's text, by rank. Collective; not in the ledger.
  virtual std::vector<std::string> exchange(const std::string& text) = 0;
  /// The same, for the first rank only: the others get none.
  virtual std::vector<std::string> collect(const std::string& text) {
    std::vector<std::string> texts = exchange(text);
    if (!is_first()) texts.clear();
    return texts;
  }

  // --- Subgroups. All members of this group call them, in the same order. ----

  /// A group per color, ranked by (key, rank). Color -1: no group (null).
  std::shared_ptr<ProcessGroup> split(int color, int key,
                                      const std::string& name);
  /// A subgroup of these ranks; null on this group's other ranks.
  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members,
                                         const std::string& name);

  /// This rank's part of a partition: `parts` are disjoint lists of ranks of
  /// this group, the same on all of them. Null where no part names this rank.
  std::shared_ptr<ProcessGroup> partition(
      const std::vector<std::vector<int>>& parts, const std::string& name);

  /// `subgroup` for groups that wrap groups: it does not compare the members'
  /// arguments, and only the members call it. `all_call`: every rank of this
  /// group calls it, each for its own part.
  std::shared_ptr<ProcessGroup> subgroup_of(const std::vector<int>& members,
                                            const std::string& name,
                                            bool all_call = false);

  /// The collective `call`, whose arguments have been checked: for groups that
  /// wrap groups.
  Work issue(const CommCall& call, const CommBuffers& buffers);

  // --- The ledger ------------------------------------------------------------

  /// Calls of this rank on this group and its subgroups, in issue order; of a
  /// long run, only the first and the last (see CommLog).
  const std::vector<CommRecord>& records() const { return log_->records(); }
  /// Bytes on the wire of all calls, as wire_bytes counts them.
  double sent_bytes() const { return log_->bytes(); }
  void clear_records() { log_->clear(); }
  /// For repeated calls that the `sim` world does not run: counts the calls
  /// since `mark` again, `times` times.
  CommLog::Mark mark_records() const { return log_->mark(); }
  void repeat_records(const CommLog::Mark& mark, std::int64_t times) {
    log_->repeat(mark, times);
  }
  /// `observer` (or null) sees the calls on this group and on all groups that
  /// share its ledger, made before or after. A call that was issued before a
  /// change owns its observer, and tells it when it completes.
  void set_observer(std::shared_ptr<CommObserver> observer);

  /// How long a call may wait for its peers before it throws and names the
  /// missing ranks.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// Tells every peer that this rank failed; their calls throw.
  virtual void abort(const std::string& reason) = 0;

 protected:
  ProcessGroup(int rank, std::vector<int> ranks, std::string name);

  // A backend's part of each call. Sizes and arguments have been checked, the
  // call is in the ledger, size() > 1; buffers are on meta devices only when
  // takes_meta() is true.
  virtual bool takes_meta() const { return false; }
  virtual Work do_collective(const CommCall& call,
                             const CommBuffers& buffers) = 0;
  virtual Work do_send(const Tensor& tensor, const CommCall& call) = 0;
  virtual Work do_recv(const Tensor& tensor, const CommCall& call) = 0;
  /// Called on the members only: their ranks in this group, by new rank.
  virtual std::shared_ptr<ProcessGroup> do_subgroup(
      const std::vector<int>& members, const std::string& name) = 0;
  /// The same where every rank of this group calls it, each for its own part.
  virtual std::shared_ptr<ProcessGroup> do_split(
      const std::vector<int>& members, const std::string& name) {
    return do_subgroup(members, name);
  }

 private:
  friend class internal::Arguments;  // whose messages say where()

  Work start(CommCall call, const CommBuffers& buffers);
  Work dispatch(const CommCall& call, const CommBuffers& buffers);
  std::string where() const;
  internal::Arguments arguments_of(CommOp op) const;

  int rank_;
  std::vector<int> ranks_;
  std::string name_;
  std::shared_ptr<CommLog> log_;
  std::shared_ptr<internal::ObserverSlot> observer_;
};

/// "all_reduce f32[1000] (sum) 'bucket 0'"
std::string call_text(const CommCall& call);
/// The parts of it that must agree among the group's members.
std::string signature_of(const CommCall& call);

}  // namespace shardbook
