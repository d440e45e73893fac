#include "chapters/03_zero_fsdp/zero3.h"

#include <algorithm>
#include <unordered_map>

#include "chapters/02_ddp/coalesce.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/context.h"
#include "core/inplace.h"

namespace shardbook::zero {

// --- Construction ------------------------------------------------------------

ZeroStage3::ZeroStage3(Module& module, ProcessGroup& group,
                       const ZeroOptions& options,
                       const std::string& optimizer,
                       const OptimizerOptions& how)
    : ZeroOptimizer(module, group, options),
      self_(std::make_shared<ZeroStage3*>(this)) {
  move_to_host(module.named_parameters());
  make_groups();
  make_units();
  for (auto& unit : units_) {
    for (Slot& slot : unit->slots) partition(slot);
  }
  ddp::broadcast_coalesced(group, module.buffers(), 0, "buffers");
  make_sharded_optimizer(optimizer, how);
  add_hooks();
}

ZeroStage3::~ZeroStage3() {
  *self_ = nullptr;
  for (auto& unit : units_) {
    for (Slot& slot : unit->slots) {
      if (slot.is_trained) {
        slot.parameter.remove_accumulate_hook(slot.hook_key);
      }
    }
  }
}

void ZeroStage3::make_groups() {
  groups_ = group_parameters(/*with_frozen=*/true);
  // Trained groups first, as the optimizer wants them
  std::stable_sort(groups_.begin(), groups_.end(), [](auto& a, auto& b) {
    return a.is_trained > b.is_trained;
  });
  RankContext& context = RankContext::current();
  for (ShardGroup& group : groups_) {
    std::vector<std::int64_t> numels;
    for (const NamedTensor& entry : group.parameters) {
      numels.push_back(entry.tensor.numel());
    }
    const SliceLayout layout = slice_layout(numels, group_.size());
    for (int i = 0; i < static_cast<int>(numels.size()); ++i) {
      const std::vector<OwnedPart> parts = layout.parts(i);
      group.parts.insert(group.parts.end(), parts.begin(), parts.end());
    }

    // The shard that is updated, and the one that is gathered
    const DType dtype = group.parameters[0].tensor.dtype();
    const bool on_host = group.is_trained ? options_.offload_optimizer
                                          : options_.offload_parameters;
    const Device& home = on_host ? context.host() : context.device;
    {
      MemoryScope kind(MemoryKind::kParameter);
      group.shard = Tensor::zeros({layout.shard}, {dtype, home});
      const bool needs_copy = on_host && !options_.offload_parameters;
      gather_shards_.push_back(
          needs_copy ? Tensor::zeros({layout.shard}, {dtype, context.device})
                     : group.shard);
    }
    if (!group.is_trained) continue;
    MemoryScope kind(MemoryKind::kGradient);
    group.grad = Tensor::zeros({layout.shard}, {dtype, home});
  }
}

void ZeroStage3::make_units() {
  // Where each parameter's slice lies
  struct Place {
    std::size_t group;
    std::int64_t offset, slice;
  };
  std::unordered_map<const void*, Place> places;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::int64_t offset = 0;
    for (const NamedTensor& entry : groups_[g].parameters) {
      const std::int64_t slice =
          (entry.tensor.numel() + group_.size() - 1) / group_.size();
      places[entry.tensor.id()] = {g, offset, slice};
      offset += slice;
    }
  }

  // One unit per module and dtype
  for (const UnitPlan& plan : plan_units(module_, options_.unit_types)) {
    const std::size_t first = units_.size();
    for (const NamedTensor& entry : plan.parameters) {
      auto found = std::find_if(
          units_.begin() + static_cast<std::ptrdiff_t>(first), units_.end(),
          [&](auto& unit) {
            return unit->slots[0].parameter.dtype() == entry.tensor.dtype();
          });
      if (found == units_.end()) {
        units_.push_back(std::make_unique<Unit>());
        found = std::prev(units_.end());
        (*found)->name = plan.name;
        (*found)->module = plan.module;
      }
      Unit& unit = **found;
      const Place& place = places.at(entry.tensor.id());
      Slot& slot = unit.slots.emplace_back();
      slot.name = entry.name;
      slot.parameter = entry.tensor;
      slot.group = place.group;
      slot.offset = place.offset;
      slot.slice = place.slice;
      slot.is_trained = groups_[place.group].is_trained;
      slot.is_persistent =
          entry.tensor.numel() <= options_.persistence_threshold;
      if (!slot.is_persistent) unit.numel += slot.slice * group_.size();
      if (!slot.is_trained) continue;
      slot.bucket_offset = unit.bucket_slice;
      unit.bucket_slice += slot.slice;
    }
  }
}

// Rank 0's values, cut into slices; the parameter becomes a view of memory
// that comes and goes.
void ZeroStage3::partition(Slot& slot) {
  const std::int64_t d = group_.size(), n = slot.parameter.numel();
  MemoryScope kind(MemoryKind::kParameter);
  slot.full = Tensor::empty({d * slot.slice}, {slot.parameter.dtype(),
                                               RankContext::current().device});
  const Tensor view = slot.full.flat_view(0, slot.parameter.shape());
  view.copy_from(slot.parameter);
  slot.full.flat_view(n, {d * slot.slice - n}).zero();
  group_.broadcast(view, 0, "parameters").wait();
  const Tensor own =
      slot.full.flat_view(group_.rank() * slot.slice, {slot.slice});
  const Tensor& kept = groups_[slot.group].shard;
  const Tensor& gathered = gather_shards_[slot.group];
  copy_across(kept.flat_view(slot.offset, {slot.slice}), own, host_traffic_);
  if (!gathered.is_same(kept)) {
    gathered.flat_view(slot.offset, {slot.slice}).copy_from(own);
  }
  slot.parameter.set_data(view);
  if (!slot.is_persistent) slot.full.release_storage();
}

void ZeroStage3::add_hooks() {
  const std::shared_ptr<ZeroStage3*> self = self_;
  module_.add_forward_pre_hook([self](Module&, Tensors&) {
    if (*self != nullptr) (*self)->begin_forward();
  });
  for (auto& owned : units_) {
    Unit* unit = owned.get();
    unit->module->add_forward_pre_hook([self, unit](Module&, Tensors&) {
      if (*self != nullptr) (*self)->fetch(*unit);
    });
    unit->module->add_forward_hook([self, unit](Module&, Tensors& outputs) {
      if (*self != nullptr) (*self)->after_forward(*unit, outputs);
    });
    for (Slot& slot : unit->slots) {
      if (!slot.is_trained) continue;
      slot.hook_key = slot.parameter.add_accumulate_hook(
          [this, unit, &slot](Tensor&) { on_gradient(*unit, slot); });
    }
  }
}

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
    slots[0]->full.restore_storage();
    buffer = slots[0]->full;
  } else {
    MemoryScope kind(MemoryKind::kCommunication);
    buffer = Tensor::empty({group_.size() * slice}, slots[0]->full.options());
  }
  const Tensor own = buffer.flat_view(group_.rank() * slice, {slice});
  std::int64_t offset = 0;
  for (const Slot* slot : slots) {
    const Shape shape{slot->slice};
    copy_across(own.flat_view(offset, shape),
                gather_shards_[slot->group].flat_view(slot->offset, shape),
                host_traffic_);
    offset += slot->slice;
  }
  return group_.all_gather(buffer, own, label);
}

// By rank, then by parameter -> by parameter, then by rank.
void ZeroStage3::unpack(const std::vector<Slot*>& slots, const Tensor& buffer) {
  if (slots.size() == 1) return;
  const std::int64_t piece = buffer.numel() / group_.size();
  std::int64_t offset = 0;
  for (const Slot* slot : slots) {
    slot->full.restore_storage();
    for (std::int64_t rank = 0; rank < group_.size(); ++rank) {
      const Shape shape{slot->slice};
      slot->full.flat_view(rank * slot->slice, shape)
          .copy_from(buffer.flat_view(rank * piece + offset, shape));
    }
    offset += slot->slice;
  }
}

void ZeroStage3::start_gather(Unit& unit) {
  StreamScope stream(kUnshardStream);
  NoGrad no_grad;
  updated_.wait();
  unit.work = gather(fetched_slots(unit), unit.gathered,
                     "fetch " + unit.name);
  unit.state = Unit::State::kInFlight;
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
  const auto found = std::find_if(units_.begin(), units_.end(), [&](auto& u) {
    return u.get() == &unit;
  });
  record_fetch(static_cast<std::size_t>(found - units_.begin()));
  if (unit.state == Unit::State::kFull) return;
  if (unit.state == Unit::State::kSharded) start_gather(unit);
  // The next ones travel while this one computes
  prefetch(unit);
  finish_gather(unit);
}

void ZeroStage3::release(Unit& unit) {
  if (unit.state != Unit::State::kFull || is_pinned_) return;
  for (Slot* slot : fetched_slots(unit)) slot->full.release_storage();
  unit.state = Unit::State::kSharded;
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
  std::int64_t elements = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    Unit& next = *units_[trace_[i]];
    // One that is in use is released before it is fetched again
    if (&next == &current || next.state == Unit::State::kFull) return;
    elements += next.numel;
    if (elements > options_.prefetch_bucket_size) return;
    if (next.state == Unit::State::kSharded) start_gather(next);
  }
}

void ZeroStage3::drop_prefetched() {
  for (auto& unit : units_) {
    if (unit->state == Unit::State::kInFlight) finish_gather(*unit);
    release(*unit);
  }
}

// --- Forward and backward ----------------------------------------------------

void ZeroStage3::begin_forward() {
  cursor_ = 0;
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
  release(unit);
}

void ZeroStage3::begin_backward() {
  if (is_in_backward_) return;
  is_in_backward_ = true;
  for (auto& unit : units_) {
    unit->num_missing = 0;
    for (Slot& slot : unit->slots) {
      slot.has_gradient = false;
      unit->num_missing += slot.is_trained;
    }
  }
  autograd::at_end_of_backward([this] { end_of_backward(); });
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
    release(unit);
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
  for (std::int64_t rank = 0; rank < group_.size(); ++rank) {
    const Tensor place = unit.bucket.flat_view(
        rank * unit.bucket_slice + slot.bucket_offset, {slot.slice});
    const std::int64_t begin = rank * slot.slice;
    const std::int64_t real =
        grad.defined()
            ? std::clamp<std::int64_t>(grad.numel() - begin, 0, slot.slice)
            : 0;
    if (real > 0) {
      scale_into(place.flat_view(0, {real}), grad.flat_view(begin, {real}),
                 share);
    }
    if (real < slot.slice) {
      place.flat_view(real, {slot.slice - real}).zero();
    }
  }
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
    unit.reduction = group_.reduce_scatter(
        unit.bucket.flat_view(group_.rank() * unit.bucket_slice,
                              {unit.bucket_slice}),
        unit.bucket, ReduceOp::kSum, "reduce " + unit.name);
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
    const Tensor own = unit.bucket.flat_view(
        group_.rank() * unit.bucket_slice, {unit.bucket_slice});
    for (const Slot& slot : unit.slots) {
      if (!slot.is_trained) continue;
      const Shape shape{slot.slice};
      take(groups_[slot.group].grad.flat_view(slot.offset, shape),
           own.flat_view(slot.bucket_offset, shape), unit.num_reduced > 0,
           host_traffic_);
    }
    done.record();
  }
  done.wait();
  unit.num_reduced += 1;
  unit.bucket = Tensor();
}

void ZeroStage3::end_of_backward() {
  // Units of which only a part was used; the last-defined first
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->bucket.defined() && reducing_ != unit->get()) reduce(**unit);
  }
  finish_reduction();
  drop_prefetched();
  is_in_backward_ = false;
  is_trace_complete_ = true;
  trace_.resize(cursor_);
  num_accumulated_ += 1;
}

// --- The step ----------------------------------------------------------------

void ZeroStage3::finish_gradients() {
  SB_CHECK(num_accumulated_ > 0,
           "zero: step without a gradient; run a backward before");
  // Units that no backward has reached
  for (auto& unit : units_) {
    if (unit->num_reduced > 0) continue;
    for (const Slot& slot : unit->slots) {
      if (!slot.is_trained) continue;
      groups_[slot.group].grad.flat_view(slot.offset, {slot.slice}).zero();
    }
  }
}

void ZeroStage3::publish(bool with_frozen) {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (!groups_[i].is_trained || gather_shards_[i].is_same(groups_[i].shard)) {
      continue;
    }
    copy_across(gather_shards_[i], groups_[i].shard, host_traffic_);
  }
  refresh_persistent(with_frozen);
  updated_.record();
}

void ZeroStage3::refresh_persistent(bool with_frozen) {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    std::vector<Slot*> slots;
    for (auto& unit : units_) {
      for (Slot& slot : unit->slots) {
        if (slot.group == i && slot.is_persistent &&
            (slot.is_trained || with_frozen)) {
          slots.push_back(&slot);
        }
      }
    }
    if (slots.empty()) continue;
    Tensor buffer;
    gather(slots, buffer, "persistent").wait();
    unpack(slots, buffer);
  }
}

void ZeroStage3::clear_gradients() {
  for (auto& unit : units_) unit->num_reduced = 0;
  num_accumulated_ = 0;
}

void ZeroStage3::gather_parameters() {
  is_pinned_ = true;
  for (auto& unit : units_) {
    if (unit->numel == 0 || unit->state == Unit::State::kFull) continue;
    if (unit->state == Unit::State::kSharded) start_gather(*unit);
    finish_gather(*unit);
  }
}

void ZeroStage3::release_parameters() {
  is_pinned_ = false;
  for (auto& unit : units_) release(*unit);
}

}  // namespace shardbook::zero
