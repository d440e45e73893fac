#pragma once

// The state that the ranks of one run_ranks share: their calls in flight, who
// waits for whom, and the first failure.
//
// Life of a call. A member *arrives*: it leaves its buffers in the Operation
// and goes on. When all have arrived, and the calls before it on the same group
// are done, the operation *starts*. A small one is run at once by the thread
// that started it, which is cheaper than waking anybody. A large one is opened
// to helpers: members that wait for it, and the workers of the world, so that
// it advances while the ranks compute. No more threads help than there are
// cores; a thread without a task sleeps.
//
// Failure. Every blocked rank is known, with the operation that it waits for
// and thereby the ranks that have not arrived there. A rank that blocks follows
// these edges: a cycle is a deadlock, and an edge to a rank that has ended
// stays forever. Edges appear only when a rank blocks or ends, so nothing else
// needs to look. (Ranks that take turns on one thread look when none can go
// on.) The first failure, of whatever kind, poisons the world: every call of
// every rank throws from then on.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/threads/device_runner.h"
#include "comm/threads/operation.h"

namespace shardbook::internal {

/// The calls of one process group, shared by its members.
struct SharedGroup {
  std::string name;
  std::vector<int> ranks;  ///< world ranks
  /// Calls that are not done; queue[i] is the group's call `first + i`.
  std::deque<std::shared_ptr<Operation>> queue;
  std::uint64_t first = 0;
  /// Messages that wait for the other side, by (source, destination, tag).
  std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Operation>>>
      messages;
  /// Groups made from this one: the k-th of the same members.
  std::map<std::vector<int>, std::vector<std::unique_ptr<SharedGroup>>> made;
};

/// How ranks sleep and are woken: threads by condition variables. A world whose
/// ranks are fibers brings its own (sim/fiber_world.h).
class Sleeper {
 public:
  virtual ~Sleeper() = default;
  /// Releases the lock until the rank is woken or the deadline passes.
  virtual std::cv_status sleep(
      int world_rank, std::unique_lock<std::mutex>& lock,
      std::chrono::steady_clock::time_point deadline) = 0;
  virtual void wake(int world_rank) = 0;
  /// The rank polls a call: a fiber lets the others run.
  virtual void yield(int /*world_rank*/) {}
};

class ThreadWorld {
 public:
  /// `num_cores`: how many threads may help with one operation; 0: all ranks
  /// take turns on one thread, which runs every operation at once.
  /// `rendezvous_sends`: small messages wait for their receiver, too.
  ThreadWorld(int world_size, int num_cores,
              std::unique_ptr<Sleeper> sleeper = nullptr,
              bool rendezvous_sends = false);
  ~ThreadWorld();

  SharedGroup& root_group() { return *root_; }
  /// The `index`-th group of these members (group ranks of `parent`).
  SharedGroup& find_group(SharedGroup& parent, const std::vector<int>& members,
                          std::size_t index, const std::string& name);

  /// Brings member `group_rank` to the group's call number `index`.
  std::shared_ptr<Operation> arrive(SharedGroup& group, int group_rank,
                                    std::uint64_t index, Slot slot);
  /// Sends or receives. Null when the message has been copied already.
  std::shared_ptr<Operation> exchange_message(SharedGroup& group,
                                              int group_rank, Slot slot);
  /// Returns when the operation is done; throws the cause of a failure.
  void wait(Operation& operation, int world_rank,
            std::chrono::milliseconds timeout);
  /// The rank has asked whether a call is done, and it is not.
  void yield(int world_rank) { sleeper_->yield(world_rank); }
  /// Keeps the buffers of a call whose Work was dropped, as long as the call
  /// may touch them.
  void keep(std::shared_ptr<Operation> operation, Tensors buffers);

  /// Called by run_ranks on the rank's own thread, before and after its body.
  void rank_begins(int world_rank);
  void rank_ended(int world_rank);
  /// For ranks that take turns, when none can go on: finds the reason and wakes
  /// them to throw.
  void all_sleep();
  void fail(int world_rank, const std::string& reason,
            std::exception_ptr cause);
  /// The same, with the exception that is being handled.
  void fail(int world_rank);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// The first failure; null when there was none.
  std::exception_ptr first_cause() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Rank {
    int num_blocked = 0;              // threads that wait
    Operation* blocked_in = nullptr;  // the wait of the last of them
    bool ended = false;
    // Several threads call for this rank: one that blocks does not stop it.
    bool has_several_threads = false;
    std::thread::id thread;
  };
  struct Kept {
    std::shared_ptr<Operation> operation;
    Tensors buffers;
  };
  Rank& rank(int world_rank) {
    return *ranks_[static_cast<std::size_t>(world_rank)];
  }

  // The caller holds the lock.
  void begin_call(int world_rank, const Slot& slot, const SharedGroup& group);
  void throw_if_failed(int world_rank, const std::string& call);
  void match(Operation& operation, int index, int world_rank, Slot slot);
  void open(std::shared_ptr<Operation> operation);
  void finish(Operation& operation);
  void wake_members(const Operation& operation, int most);
  void check_progress(int world_rank, const Operation& operation);
  void check_all_progress();
  bool find_cycle(int from, int target, std::vector<bool>& seen,
                  std::vector<int>& path);
  std::string cycle_text(std::vector<int> path);
  std::string timeout_text(const Operation& operation, int world_rank,
                           std::chrono::milliseconds timeout);
  void poison(int world_rank, const std::string& reason,
              std::exception_ptr cause);
  [[noreturn]] void poison_and_throw(int world_rank, const std::string& reason);
  static std::string failure_text(int failed, const std::string& reason,
                                  int world_rank, const std::string& call);
  void start_workers();

  // These release the lock for a while.
  bool run_on_gpu(Operation& operation, Lock& lock);
  void run_ready(Lock& lock);
  void help(Operation& operation, Lock& lock);
  void work();

  const int num_cores_;
  const bool rendezvous_sends_;
  std::unique_ptr<Sleeper> sleeper_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<SharedGroup> root_;
  /// Operations that may start, for the thread that made them ready.
  std::deque<std::shared_ptr<Operation>> ready_;
  /// Large operations that have started, for everybody.
  std::deque<std::shared_ptr<Operation>> open_;
  std::list<Kept> kept_;

  /// By the number of the GPU; made at the first call there.
  std::map<int, std::unique_ptr<DeviceRunner>> runners_;

  std::condition_variable wake_worker_;
  std::vector<std::thread> workers_;
  bool stops_ = false;

  std::atomic<bool> failed_{false};
  int failed_rank_ = -1;
  std::string failure_reason_;
  std::exception_ptr first_cause_;
};

}  // namespace shardbook::internal
