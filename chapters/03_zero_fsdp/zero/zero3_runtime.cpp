// Fetching before use, releasing after it, reducing gradients.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero3.h"
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
}

void ZeroStage3::finish_gather(Unit& unit) {
  NoGrad no_grad;
  unit.work.wait();
  unpack(fetched_slots(unit), unit.gathered);
  unit.gathered = Tensor();
}

void ZeroStage3::release(Unit& unit) {
  unit.work.wait();  // gathered ahead, and not used
  unit.gathered = Tensor();
  for (Slot* slot : fetched_slots(unit)) release_storage(slot->full);
}

// A forward alone has no next use.
void ZeroStage3::end_use(const Unit& unit) {
  fetches_->end_use(unit.index,
                    is_in_backward() || RankContext::current().grad_enabled);
}

// --- Forward and backward ----------------------------------------------------

void ZeroStage3::begin_forward() {
  fetches_->begin_forward();
  if (!RankContext::current().is_recomputing) fetches_->release_all();
}

void ZeroStage3::after_forward(Unit& unit, const Tensors& outputs) {
  if (RankContext::current().grad_enabled) {
    for (const Tensor& output : outputs) {
      if (!output.requires_grad() || output.is_leaf()) continue;
      output.add_grad_hook([self = self_, &unit](const Tensor&) {
        if (*self != nullptr) {
          (*self)->begin_backward();
          (*self)->fetches_->fetch(unit.index);
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
  // Reduce partly used units, in reverse definition order
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->bucket.defined() && reducing_ != unit->get()) reduce(**unit);
  }
  finish_reduction();
  fetches_->end_micro_step();
  num_accumulated_ += 1;
}

}  // namespace shardbook::zero
