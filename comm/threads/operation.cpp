#include "comm/threads/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/internal/reduce.h"
#include "comm/threads/device_runner.h"

namespace shardbook::internal {
namespace {

// Bytes of one buffer in one task. A few such buffers fit a second-level cache,
// and taking a task costs little compared to its work.
constexpr std::int64_t kTaskBytes = 128 << 10;

bool same_call(const Slot& a, const Slot& b) {
  if (a.is_exchange || b.is_exchange) return a.is_exchange == b.is_exchange;
  return a.call.op == b.call.op && a.call.dtype == b.call.dtype &&
         // With counts, each rank has its own number of elements.
         (a.call.op == CommOp::kAllToAllV || a.call.numel == b.call.numel) &&
         a.call.root_or_peer == b.call.root_or_peer &&
         a.call.reduce_op == b.call.reduce_op;
}

const char* at(const void* base, std::int64_t offset_bytes) {
  return static_cast<const char*>(base) + offset_bytes;
}

char* at(void* base, std::int64_t offset_bytes) {
  return static_cast<char*>(base) + offset_bytes;
}

template <typename Pointer>
std::vector<Pointer> all_at(std::vector<Pointer> bases, std::int64_t offset) {
  for (Pointer& base : bases) base = at(base, offset);
  return bases;
}

}  // namespace

std::string slot_text(const Slot& slot) {
  return slot.is_exchange ? "exchange" : call_text(slot.call);
}

Operation::Operation(std::vector<int> ranks, std::string group_name,
                     SharedGroup* queue)
    : ranks(std::move(ranks)), group_name(std::move(group_name)), queue(queue) {
  slots.resize(this->ranks.size());
}

std::string Operation::mismatch(int index, const Slot& slot) const {
  const auto self = static_cast<std::size_t>(index);
  const int me = ranks[self];
  const bool point_to_point =
      slot.call.op == CommOp::kSend || slot.call.op == CommOp::kRecv;
  for (std::size_t other = 0; other < slots.size(); ++other) {
    const Slot& theirs = slots[other];
    if (!theirs.arrived) continue;
    const bool same = point_to_point ? slot.call.dtype == theirs.call.dtype &&
                                           slot.call.numel == theirs.call.numel
                                     : same_call(slot, theirs);
    if (!same) {
      return fmt::format(
          "calls over '{}' do not match: rank {} called {}, rank {} called {}",
          group_name, ranks[other], slot_text(theirs), me, slot_text(slot));
    }
    if (slot.has_buffers && theirs.has_buffers &&
        (slot.gpu < 0) != (theirs.gpu < 0)) {
      const bool is_mine = slot.gpu >= 0;
      return fmt::format(
          "{} over '{}': rank {} passes a tensor on a GPU, rank {} one of the "
          "host; both must lie on the same type of device",
          slot_text(slot), group_name, is_mine ? me : ranks[other],
          is_mine ? ranks[other] : me);
    }
    if (slot.call.op != CommOp::kAllToAllV || slot.is_exchange) continue;
    // Each of the two must expect as many elements as the other sends.
    const auto check = [&](std::size_t from, std::int64_t sent, std::size_t to,
                           std::int64_t expected) {
      if (sent == expected) return std::string();
      return fmt::format(
          "counts of all_to_all_v over '{}' do not match: rank {} sends {} "
          "elements to rank {}, which expects {}",
          group_name, ranks[from], sent, ranks[to], expected);
    };
    std::string wrong =
        check(self, slot.send_counts[other], other, theirs.recv_counts[self]);
    if (wrong.empty()) {
      wrong =
          check(other, theirs.send_counts[self], self, slot.recv_counts[other]);
    }
    if (!wrong.empty()) return wrong;
  }
  return std::string();
}

void Operation::arrive(int index, Slot slot) {
  slot.arrived = true;
  slots[static_cast<std::size_t>(index)] = std::move(slot);
  ++arrived_;
}

std::vector<int> Operation::missing() const {
  std::vector<int> result;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (!slots[i].arrived) result.push_back(ranks[i]);
  }
  return result;
}

std::string Operation::text_of(int world_rank) const {
  const auto found = std::find(ranks.begin(), ranks.end(), world_rank);
  return slot_text(slots[static_cast<std::size_t>(found - ranks.begin())]) +
         " over '" + group_name + "'";
}

bool Operation::is_send_of(int world_rank) const {
  return ranks.front() == world_rank &&
         slots.front().call.op == CommOp::kSend && !slots.front().is_exchange;
}

// --- Planning ----------------------------------------------------------------

void Operation::plan() {
  const Slot& first = slots[0];
  const CommCall& call = first.call;
  if (first.is_exchange || call.op == CommOp::kBarrier) return;
  const auto elt = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const auto size = static_cast<std::int64_t>(slots.size());
  const std::int64_t n = call.numel, piece = n / size;
  const auto root = static_cast<std::size_t>(std::max(call.root_or_peer, 0));
  task_count_ = kTaskBytes / elt;

  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const Slot& slot : slots) {
    inputs.push_back(slot.input);
    outputs.push_back(slot.output);
    if (slot.gpu < 0) continue;
    is_on_one_gpu_ = is_on_one_gpu_ && (gpu_ < 0 || gpu_ == slot.gpu);
    gpu_ = slot.gpu;
  }

  // Rank r's piece of the whole tensor.
  const auto plan_piece_of = [&](std::size_t r) {
    const std::int64_t offset = static_cast<std::int64_t>(r) * piece * elt;
    if (call.op == CommOp::kReduceScatter) {
      add_piece(all_at(inputs, offset), {outputs[r]}, piece);
    } else if (call.op == CommOp::kAllGather) {
      add_piece({inputs[r]}, all_at(outputs, offset), piece);
    } else if (call.op == CommOp::kScatter) {
      add_piece({at(inputs[root], offset)}, {outputs[r]}, piece);
    } else {
      add_piece({inputs[r]}, {at(outputs[root], offset)}, piece);  // gather
    }
  };

  switch (call.op) {
    case CommOp::kAllReduce:
      add_piece(inputs, outputs, n);
      break;
    case CommOp::kReduce:
      add_piece(inputs, {outputs[root]}, n);
      break;
    case CommOp::kBroadcast:
      add_piece({inputs[root]}, outputs, n);
      break;
    case CommOp::kAllToAll:
    case CommOp::kAllToAllV:
      plan_all_to_all();
      break;
    case CommOp::kSend:
    case CommOp::kRecv:  // slot 0 sends, slot 1 receives
      add_piece({inputs[0]}, {outputs[1]}, n);
      break;
    default:
      for (std::size_t r = 0; r < slots.size(); ++r) plan_piece_of(r);
      break;
  }
}

void Operation::plan_all_to_all() {
  const auto elt = static_cast<std::int64_t>(dtype_bytes(slots[0].call.dtype));
  // Pieces lie end to end, at the source by receiver, at the receiver by
  // source.
  std::vector<std::int64_t> received(slots.size(), 0);
  for (std::size_t s = 0; s < slots.size(); ++s) {
    std::int64_t sent = 0;
    for (std::size_t d = 0; d < slots.size(); ++d) {
      const std::int64_t count = slots[s].send_counts[d];
      add_piece({at(slots[s].input, sent * elt)},
                {at(slots[d].output, received[d] * elt)}, count);
      sent += count;
      received[d] += count;
    }
  }
}

void Operation::add_piece(std::vector<const void*> inputs,
                          std::vector<void*> outputs, std::int64_t count) {
  if (inputs.size() == 1) {
    // In place, one output is the input itself: no copy.
    outputs.erase(std::remove(outputs.begin(), outputs.end(), inputs[0]),
                  outputs.end());
  }
  if (count == 0 || outputs.empty()) return;
  const auto elt = static_cast<std::int64_t>(dtype_bytes(slots[0].call.dtype));
  const auto buffers =
      static_cast<std::int64_t>(inputs.size() + outputs.size());
  pieces_.push_back({std::move(inputs), std::move(outputs), count, num_tasks_});
  num_tasks_ += (count + task_count_ - 1) / task_count_;
  traffic_bytes_ += buffers * count * elt;
}

// --- Running -----------------------------------------------------------------

void Operation::run_on_gpu(DeviceRunner& runner) const {
  const DType dtype = slots[0].call.dtype;
  for (const Piece& piece : pieces_) {
    if (piece.inputs.size() > 1) {
      runner.combine(dtype, slots[0].call.reduce_op, piece.inputs,
                     piece.outputs, piece.count, is_on_one_gpu_);
      continue;
    }
    const auto bytes =
        static_cast<std::size_t>(piece.count) * dtype_bytes(dtype);
    for (void* output : piece.outputs) {
      runner.copy(output, piece.inputs[0], bytes);
    }
  }
  runner.finish();
}

bool Operation::run_tasks() {
  std::int64_t ran = 0;
  while (true) {
    const std::int64_t task = next_task_.fetch_add(1);
    if (task >= num_tasks_) break;
    run_task(task);
    ++ran;
  }
  return ran > 0 && tasks_ended_.fetch_add(ran) + ran == num_tasks_;
}

void Operation::run_task(std::int64_t task) const {
  // The piece is the last that begins at or before this task.
  const auto after = std::upper_bound(
      pieces_.begin(), pieces_.end(), task,
      [](std::int64_t t, const Piece& p) { return t < p.first_task; });
  const Piece& piece = *std::prev(after);
  const DType dtype = slots[0].call.dtype;
  const auto elt = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::int64_t begin = (task - piece.first_task) * task_count_;
  const std::int64_t count = std::min(task_count_, piece.count - begin);

  if (piece.inputs.size() == 1) {
    for (void* output : piece.outputs) {
      std::memcpy(at(output, begin * elt), at(piece.inputs[0], begin * elt),
                  static_cast<std::size_t>(count * elt));
    }
    return;
  }
  reduce_buffers(dtype, slots[0].call.reduce_op,
                 all_at(piece.inputs, begin * elt),
                 all_at(piece.outputs, begin * elt), count);
}

}  // namespace shardbook::internal
