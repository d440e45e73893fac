// Fetching before use, releasing after it, reducing what backward leaves.

#include <algorithm>
#include <limits>
#include <utility>

#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {

// --- Fetch and release -------------------------------------------------------

std::vector<ZeroStage3::Slot*> ZeroStage3::fetched_slots(Unit& unit) {
  std::vector<Slot*> slots;
  for (Slot& slot : unit.slots) {
    if (!slot.is_persistent) slots.push_back(&slot);
  }
  return slots;
}

// Gathers into the parameter itself when there is one, through a rank-major
// buffer when there are several.
Work ZeroStage3::gather(const std::vector<Slot*>& slots, Tensor& buffer,
                        const std::string& label) {
  std::int64_t slice = 0;
  for (const Slot* slot : slots) slice += slot->slice;
  if (slots.size() == 1) {
    restore_storage(slots[0]->full);
    buffer = slots[0]->full;
  } else {
    MemoryScope kind(MemoryKind::kCommunication);
    buffer = Tensor::empty({group_.size() * slice}, slots[0]->full.options());
  }
  const Tensor own = buffer.flat_view(group_.rank() * slice, {slice});
  std::vector<CopyRun> runs;
  std::int64_t offset = 0;
  for (const Slot* slot : slots) {
    const Shape shape{slot->slice};
    runs.push_back(
        {own.flat_view(offset, shape),
         gather_shards_[slot->group].flat_view(slot->offset, shape)});
    offset += slot->slice;
  }
  take_runs(runs, /*accumulates=*/false, host_traffic_);
  return group_.all_gather(buffer, own, label);
}

// By rank, then by parameter -> by parameter, then by rank.
void ZeroStage3::unpack(const std::vector<Slot*>& slots, const Tensor& buffer) {
  if (slots.size() == 1) return;
  const std::int64_t piece = buffer.numel() / group_.size();
  std::vector<CopyRun> runs;
  std::int64_t offset = 0;
  for (const Slot* slot : slots) {
    restore_storage(slot->full);
    runs.push_back({slot->full,
                    buffer.flat_view(offset, {buffer.numel() - offset}),
                    group_.size(), slot->slice, slot->slice, piece});
    offset += slot->slice;
  }
  copy_runs(runs);
}

void ZeroStage3::start_gather(Unit& unit) {
  // Without prefetching, a gather waits for the computation before it
  StreamScope stream(options_.prefetch_bucket_size > 0 ? kUnshardStream
                                                       : kComputeStream);
  NoGrad no_grad;
  updated_.wait();
  unit.work = gather(fetched_slots(unit), unit.gathered, "fetch " + unit.name);
  unit.state = Unit::State::kInFlight;
  live_ += unit.numel;
}

void ZeroStage3::finish_gather(Unit& unit) {
  NoGrad no_grad;
  unit.work.wait();
  unpack(fetched_slots(unit), unit.gathered);
  unit.gathered = Tensor();
  unit.state = Unit::State::kFull;
}

void ZeroStage3::fetch(Unit& unit) {
  if (unit.numel == 0) return;
  const auto found = std::find_if(units_.begin(), units_.end(),
                                  [&](auto& u) { return u.get() == &unit; });
  record_fetch(static_cast<std::size_t>(found - units_.begin()));
  if (unit.state == Unit::State::kFull) {
    const bool was_kept = std::exchange(unit.is_kept, false);
    if (was_kept) prefetch(unit);
    return;
  }
  if (unit.state == Unit::State::kSharded) {
    make_room(unit.numel);
    start_gather(unit);
  }
  // The next ones travel while this one computes
  prefetch(unit);
  finish_gather(unit);
}

void ZeroStage3::release(Unit& unit) {
  if (unit.state != Unit::State::kFull || is_pinned_) return;
  for (Slot* slot : fetched_slots(unit)) release_storage(slot->full);
  unit.state = Unit::State::kSharded;
  unit.is_kept = false;
  live_ -= unit.numel;
}

// Keeps a unit that is used again soon. A forward alone has no next use.
void ZeroStage3::end_use(Unit& unit) {
  const bool is_soon =
      is_trace_complete_ &&
      (is_in_backward() || RankContext::current().grad_enabled) &&
      reuse_distance(unit) < options_.max_reuse_distance;
  if (unit.state == Unit::State::kFull && is_soon &&
      live_ <= options_.max_live_parameters) {
    unit.is_kept = true;
  } else {
    release(unit);
  }
}

/// Elements that are fetched before the unit is fetched again; more than any
/// limit where it is not.
std::int64_t ZeroStage3::reuse_distance(const Unit& unit) const {
  std::int64_t elements = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    const Unit& next = *units_[trace_[i]];
    if (&next == &unit) return elements;
    elements += next.numel;
  }
  return std::numeric_limits<std::int64_t>::max();
}

// Releases kept units, those of the farthest next use first, until so many
// elements fit.
void ZeroStage3::make_room(std::int64_t elements) {
  while (!is_pinned_ && live_ + elements > options_.max_live_parameters) {
    Unit* farthest = nullptr;
    for (auto& unit : units_) {
      if (unit->is_kept &&
          (farthest == nullptr ||
           reuse_distance(*unit) > reuse_distance(*farthest))) {
        farthest = unit.get();
      }
    }
    if (farthest == nullptr) return;
    release(*farthest);
  }
}

void ZeroStage3::record_fetch(std::size_t unit) {
  if (is_trace_complete_ && cursor_ < trace_.size() &&
      trace_[cursor_] == unit) {
    cursor_ += 1;
    return;
  }
  // Another way than last time: record it from here on
  trace_.resize(cursor_);
  is_trace_complete_ = false;
  trace_.push_back(unit);
  cursor_ += 1;
}

void ZeroStage3::prefetch(const Unit& current) {
  if (!is_trace_complete_) return;
  std::int64_t ahead = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    Unit& next = *units_[trace_[i]];
    if (next.is_kept) continue;
    // One that is in use is released before it is fetched again
    if (&next == &current || next.state == Unit::State::kFull) return;
    // The last unit may pass the limits: a large one would never fit
    if (ahead >= options_.prefetch_bucket_size) return;
    ahead += next.numel;
    if (next.state != Unit::State::kSharded) continue;
    if (live_ >= options_.max_live_parameters) return;
    start_gather(next);
  }
}

// Releases units that were gathered ahead and not used, or that an exception
// left behind.
void ZeroStage3::drop_gathered() {
  if (is_pinned_) return;
  for (auto& unit : units_) {
    if (unit->state == Unit::State::kSharded) continue;
    unit->work.wait();
    unit->gathered = Tensor();
    unit->state = Unit::State::kFull;
    release(*unit);
  }
}

// --- Forward and backward ----------------------------------------------------

void ZeroStage3::begin_forward() {
  cursor_ = 0;
  if (!RankContext::current().is_recomputing) drop_gathered();
}

void ZeroStage3::after_forward(Unit& unit, const Tensors& outputs) {
  if (RankContext::current().grad_enabled) {
    for (const Tensor& output : outputs) {
      if (!output.requires_grad() || output.is_leaf()) continue;
      output.add_grad_hook([self = self_, &unit](const Tensor&) {
        if (*self != nullptr) {
          (*self)->begin_backward();
          (*self)->fetch(unit);
        }
        return Tensor();
      });
    }
  }
  end_use(unit);
}

void ZeroStage3::begin_backward() {
  if (is_in_backward()) return;
  watch_backward([this] { end_of_backward(); });
  for (auto& unit : units_) {
    unit->num_missing = 0;
    for (Slot& slot : unit->slots) {
      slot.has_gradient = false;
      unit->num_missing += slot.is_trained;
    }
  }
}

void ZeroStage3::on_gradient(Unit& unit, Slot& slot) {
  begin_backward();
  // A second gradient in one backward (recomputed twice) is a second reduction
  if (slot.has_gradient) reduce(unit);
  if (reducing_ == &unit) finish_reduction();
  copy_into_bucket(unit, slot);
  slot.parameter.clear_grad();
  if (unit.num_missing == 0) {
    reduce(unit);
    end_use(unit);
  }
}

void ZeroStage3::copy_into_bucket(Unit& unit, Slot& slot) {
  if (!unit.bucket.defined()) {
    MemoryScope kind(MemoryKind::kCommunication);
    unit.bucket = Tensor::empty({group_.size() * unit.bucket_slice},
                                slot.parameter.options());
  }
  // Divide before the sum; padding is zero
  const Tensor grad = slot.parameter.grad();
  const double share = 1.0 / group_.size();
  const std::int64_t slice = slot.slice, stride = unit.bucket_slice;
  const Tensor places = unit.bucket.flat_view(
      slot.bucket_offset, {unit.bucket.numel() - slot.bucket_offset});
  const std::int64_t numel = grad.defined() ? grad.numel() : 0;
  const std::int64_t whole = slice > 0 ? numel / slice : 0;
  std::vector<CopyRun> runs;
  if (whole > 0) runs.push_back({places, grad, whole, slice, stride, slice});
  for (std::int64_t rank = whole; rank < group_.size(); ++rank) {
    const std::int64_t real =
        std::clamp<std::int64_t>(numel - rank * slice, 0, slice);
    if (real > 0) {
      runs.push_back({places.flat_view(rank * stride, {real}),
                      grad.flat_view(rank * slice, {real})});
    }
    if (real < slice) {
      places.flat_view(rank * stride + real, {slice - real}).zero();
    }
  }
  copy_runs(runs, share);
  slot.has_gradient = true;
  unit.num_missing -= 1;
}

void ZeroStage3::reduce(Unit& unit) {
  for (Slot& slot : unit.slots) {
    if (slot.is_trained && !slot.has_gradient) copy_into_bucket(unit, slot);
  }
  finish_reduction();
  Event filled;
  filled.record();
  {
    StreamScope stream(options_.overlap_comm ? kReduceStream : kComputeStream);
    filled.wait();
    unit.sent = sent_as(unit.bucket);
    unit.reduction = group_.reduce_scatter(
        unit.sent.flat_view(group_.rank() * unit.bucket_slice,
                            {unit.bucket_slice}),
        unit.sent, ReduceOp::kSum, "reduce " + unit.name);
  }
  reducing_ = &unit;
  for (Slot& slot : unit.slots) {
    slot.has_gradient = false;
    unit.num_missing += slot.is_trained;
  }
  if (!options_.overlap_comm) finish_reduction();
}

void ZeroStage3::finish_reduction() {
  if (reducing_ == nullptr) return;
  Unit& unit = *reducing_;
  reducing_ = nullptr;
  Event done;
  {
    StreamScope stream(options_.overlap_comm ? kReduceStream : kComputeStream);
    unit.reduction.wait();
    const auto own_part = [&](const Tensor& bucket) {
      return bucket.flat_view(group_.rank() * unit.bucket_slice,
                              {unit.bucket_slice});
    };
    const Tensor own = own_part(unit.bucket);
    if (!unit.sent.is_same(unit.bucket)) own.copy_from(own_part(unit.sent));
    std::vector<CopyRun> runs;
    for (const Slot& slot : unit.slots) {
      if (!slot.is_trained) continue;
      const Shape shape{slot.slice};
      runs.push_back({groups_[slot.group].grad.flat_view(slot.offset, shape),
                      own.flat_view(slot.bucket_offset, shape)});
    }
    take_runs(runs, unit.num_reduced > 0, host_traffic_);
    done.record();
  }
  done.wait();
  unit.num_reduced += 1;
  unit.bucket = unit.sent = Tensor();
}

void ZeroStage3::end_of_backward() {
  // Units of which only a part was used; the last-defined first
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->bucket.defined() && reducing_ != unit->get()) reduce(**unit);
  }
  finish_reduction();
  drop_gathered();
  is_trace_complete_ = true;
  trace_.resize(cursor_);
  num_accumulated_ += 1;
}

}  // namespace shardbook::zero
