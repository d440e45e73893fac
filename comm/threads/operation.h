#pragma once

// One call of a group, as all its members share it.
//
// Members bring their buffers (slots). When the last has arrived, the call is
// cut into pieces. A piece names the buffers that are combined and the places
// of the result:
//
//   all_reduce      1 piece    all inputs       -> all outputs
//   reduce_scatter  P pieces   all inputs at r  -> output of r
//   all_gather      P pieces   input of s       -> all outputs at s
//   all_to_all      P*P        input of s at d  -> output of d at s
//   send, recv      1 piece    the sender's     -> the receiver's
//
// Pieces are cut into cache-sized tasks. Tasks touch disjoint memory, so any
// thread may run any of them in any order: every byte is read once and written
// once, and no result depends on which thread ran which task.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace shardbook::internal {

class DeviceRunner;
struct SharedGroup;

/// One member's part of a call.
struct Slot {
  bool arrived = false;
  CommCall call;
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<std::int64_t> send_counts, recv_counts;  ///< all_to_all only
  bool has_buffers = false;
  int gpu = -1;             ///< of the buffers; -1: memory of the host
  std::vector<char> eager;  ///< a copy of a small message, which is the input
  /// exchange only: a control call, which has no buffers.
  bool is_exchange = false;
  std::string text;
};

/// "all_reduce f32[10]", or "exchange".
std::string slot_text(const Slot& slot);

/// The world's mutex guards its state, except where noted.
class Operation {
 public:
  /// `ranks`: the world rank of each slot. `queue`: the group whose calls run
  /// one after the other; null for messages.
  Operation(std::vector<int> ranks, std::string group_name,
            SharedGroup* queue = nullptr);

  /// Checks that slot `index` makes the call that the others make. Returns the
  /// difference, naming both ranks and both calls; empty when they agree.
  std::string mismatch(int index, const Slot& slot) const;
  void arrive(int index, Slot slot);
  bool complete() const { return arrived_ == static_cast<int>(slots.size()); }
  /// World ranks of the members that have not arrived.
  std::vector<int> missing() const;
  /// The call of that rank: "all_reduce f32[10] over 'world'".
  std::string text_of(int world_rank) const;
  /// Whether that rank sends a message in this call.
  bool is_send_of(int world_rank) const;

  /// Cuts the call into tasks, when all have arrived.
  void plan();
  std::int64_t num_tasks() const { return num_tasks_; }
  /// Bytes that the tasks read and write.
  std::int64_t traffic_bytes() const { return traffic_bytes_; }

  /// Runs tasks until none is left to take; true when this call ran the last
  /// one to end. Needs no lock.
  bool run_tasks();
  /// The GPU that runs the call instead; -1: none, its buffers are the host's.
  int gpu() const { return gpu_; }
  void run_on_gpu(DeviceRunner& runner) const;
  bool has_tasks_to_take() const {
    return next_task_.load(std::memory_order_relaxed) < num_tasks_;
  }

  const std::vector<int> ranks;
  const std::string group_name;
  SharedGroup* const queue;
  std::vector<Slot> slots;
  /// Other threads may help with the tasks.
  bool is_open = false;
  int num_helpers = 0;
  /// All tasks have run. Readable without the lock.
  std::atomic<bool> done{false};

 private:
  // result of `inputs` goes to each of `outputs`
  struct Piece {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::int64_t count = 0;
    std::int64_t first_task = 0;
  };
  void add_piece(std::vector<const void*> inputs, std::vector<void*> outputs,
                 std::int64_t count);
  void plan_all_to_all();
  void run_task(std::int64_t task) const;

  int arrived_ = 0;
  int gpu_ = -1;
  bool is_on_one_gpu_ = true;
  std::vector<Piece> pieces_;
  std::int64_t task_count_ = 1;  // elements of one task
  std::int64_t num_tasks_ = 0;
  std::int64_t traffic_bytes_ = 0;
  std::atomic<std::int64_t> next_task_{0};
  std::atomic<std::int64_t> tasks_ended_{0};
};

}  // namespace shardbook::internal
