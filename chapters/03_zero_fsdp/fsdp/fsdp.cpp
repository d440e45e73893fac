#include "chapters/03_zero_fsdp/fsdp/fsdp.h"

#include <algorithm>
#include <cmath>

#include "chapters/common/sharded/parts.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"
#include "core/ops.h"
#include "core/optim.h"

namespace shardbook::fsdp {

double gradient_predivide_factor(int num_ranks) {
  int factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) factor *= 2;
  return factor;
}

NoSync::NoSync(FullyShardedDataParallel& fsdp)
    : fsdp_(fsdp), previous_(fsdp.is_syncing_) {
  fsdp_.is_syncing_ = false;
}

NoSync::~NoSync() { fsdp_.is_syncing_ = previous_; }

// --- Forward -----------------------------------------------------------------

void FullyShardedDataParallel::hook(Unit& unit) {
  unit.module->add_forward_pre_hook(
      [this, &unit](Module&, Tensors& inputs) { pre_forward(unit, inputs); });
  unit.module->add_forward_hook([this, &unit](Module&, Tensors& outputs) {
    post_forward(unit, outputs);
  });
}

void FullyShardedDataParallel::pre_forward(Unit& unit, Tensors& inputs) {
  if (is_summoned_) return;
  const bool again = RankContext::current().is_recomputing;
  if (unit.is_root && !again) {
    check_no_failure("forward");
    if (graph_.expired()) begin_orders();
    // Gathers wait for the last update, but not for this step's computation
    Event begun;
    begun.record();
    StreamScope stream(kUnshardStream);
    begun.wait();
  }
  if (!again && unit.flat) {
    unit.begun = begun_.size();
    begun_.push_back(&unit);
  }

  if (unit.flat) unit.flat->check_frozen();

  // Make the unit whole
  unshard(unit);
  if (options_.forward_prefetch && !again) prefetch_for_forward(unit);
  if (unit.flat) unit.flat->finish_gather();
  if (again && unit.flat) unit.flat->prepare_grads();

  cast_inputs(unit, inputs);
  if (RankContext::current().grad_enabled) unit.calls += 1;
  // The number of this forward; a recomputed one repeats the last
  const std::size_t count = unit.finished.size();
  const std::size_t nth = again && count > 0 ? count - 1 : count;
  if (autograd::needs_grad(inputs)) watch_end(unit, nth, inputs);
}

// Earlier forwards get no backward: their graph is gone. One that failed, or
// needed no backward, may have left units whole.
void FullyShardedDataParallel::begin_orders() {
  begun_.clear();
  finished_.clear();
  for (const auto& unit : units_) {
    unit->finished.clear();
    unit->calls = unit->awaited = 0;
  }
  reshard_all();
}

void FullyShardedDataParallel::cast_inputs(Unit& unit, Tensors& inputs) {
  if (!unit.flat) return;
  unit.input_dtypes.clear();
  for (Tensor& input : inputs) {
    unit.input_dtypes.push_back(input.dtype());
    if (is_floating(input.dtype()) &&
        input.dtype() != unit.flat->compute_dtype()) {
      input = to_dtype(input, unit.flat->compute_dtype());
    }
  }
}

// The gradients of a unit's inputs are complete when everything inside it has
// run backward: an identity in front of the inputs detects this. (If the inputs
// need none, the end of backward does.)
void FullyShardedDataParallel::watch_end(Unit& unit, std::size_t nth,
                                         Tensors& inputs) {
  Tensors watched;
  for (const Tensor& input : inputs) {
    if (input.requires_grad()) watched.push_back(input);
  }
  const Tensors passed = autograd::custom_function(
      "post_backward", watched, [](const Tensors& x) { return x; },
      [this, &unit, nth](const Tensors& grads) {
        post_backward(unit, nth);
        return grads;
      });
  std::size_t next = 0;
  for (Tensor& input : inputs) {
    if (input.requires_grad()) input = passed[next++];
  }
}

bool FullyShardedDataParallel::frees_after_forward(const Unit& unit) const {
  const RankContext& context = RankContext::current();
  // A recomputed forward is followed by its backward
  if (context.is_recomputing) return false;
  // Backward begins with the root; without a backward nothing is kept
  return unit.is_root ? !context.grad_enabled : options_.gathers_again();
}

void FullyShardedDataParallel::post_forward(Unit& unit, Tensors& outputs) {
  if (is_summoned_) return;
  if (frees_after_forward(unit)) reshard(unit);
  if (unit.keeps_dtype) {
    for (Tensor& output : outputs) {
      if (output.dtype() != unit.input_dtypes[0]) {
        output = to_dtype(output, unit.input_dtypes[0]);
      }
    }
  }
  if (unit.flat && !RankContext::current().is_recomputing) {
    unit.awaited += 1;
    unit.finished.push_back(finished_.size());
    finished_.push_back(&unit);
  }
  const std::size_t nth = unit.finished.empty() ? 0 : unit.finished.size() - 1;
  std::shared_ptr<void> graph;
  if (unit.is_root) {
    graph = graph_.lock();
    if (graph == nullptr) graph = std::make_shared<char>();
    graph_ = graph;
  }
  for (const Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.add_grad_hook([this, &unit, nth, graph](const Tensor&) {
      pre_backward(unit, nth);
      return Tensor();
    });
  }
  // Free units that were prefetched and not used, or kept for a backward
  if (unit.is_root && !RankContext::current().grad_enabled) reshard_all();
}

// --- Backward ----------------------------------------------------------------

void FullyShardedDataParallel::pre_backward(Unit& unit, std::size_t nth) {
  check_no_failure("backward");
  if (!is_in_backward_) {
    is_in_backward_ = true;
    autograd::at_end_of_backward([this] { end_of_backward(); },
                                 [this] { backward_failed(); });
  }
  unshard(unit);
  if (options_.backward_prefetch == BackwardPrefetch::kPre) {
    prefetch_for_backward(unit, nth);
  }
  if (!unit.flat) return;
  unit.flat->finish_gather();
  unit.flat->prepare_grads();
}

void FullyShardedDataParallel::post_backward(Unit& unit, std::size_t nth) {
  unit.calls -= 1;
  unit.awaited -= 1;
  if (unit.calls > 0) return;  // an earlier call's backward is yet to come
  if (!unit.is_root) reshard(unit);
  if (options_.backward_prefetch == BackwardPrefetch::kPost) {
    prefetch_for_backward(unit, nth);
  }
  reduce(unit);
}

void FullyShardedDataParallel::reduce(Unit& unit) {
  if (!unit.flat || !unit.flat->has_grads() || !is_syncing_) return;
  // One reduction travels while the next unit computes
  finish_reduction();
  Event computed;
  computed.record();
  StreamScope stream(kReduceStream);
  computed.wait();
  unit.flat->start_reduce(divide_before_);
  reducing_ = &unit;
}

void FullyShardedDataParallel::finish_reduction() {
  if (reducing_ == nullptr) return;
  StreamScope stream(kReduceStream);
  reducing_->flat->finish_reduce(divide_after_);
  reducing_ = nullptr;
}

void FullyShardedDataParallel::end_of_backward() {
  // Units whose inputs need no gradient, the root among them
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->flat) {
      (*unit)->flat->has_grads() ? reduce(**unit) : (*unit)->flat->drop_grads();
    }
    (*unit)->calls = (*unit)->awaited = 0;
  }
  reshard_all();
  finish_reduction();
  Event reduced;
  {
    StreamScope stream(kReduceStream);
    reduced.record();
  }
  reduced.wait();

  last_begun_ = begun_;
  graph_.reset();
  is_first_iteration_ = is_in_backward_ = false;
}

void FullyShardedDataParallel::backward_failed() {
  is_in_backward_ = false;
  has_failed_ = true;
  // An optimizer leaves parameters without gradients as they are
  for (const Tensor& shard : parameters()) shard.clear_grad();
}

void FullyShardedDataParallel::check_no_failure(const char* what) const {
  SB_CHECK(!has_failed_, "fsdp: ", what,
           " after a backward that failed: this step's gradients are lost; "
           "call clear_grad() and run the step again from its first "
           "micro-batch");
}

// --- Gather and free ---------------------------------------------------------

void FullyShardedDataParallel::unshard(Unit& unit) {
  if (!unit.flat || !unit.flat->is_sharded()) return;
  check_order(unit);
  // The host may run far ahead of the device, and memory is allocated when a
  // gather is issued: at most two gathered units may still be in use
  if (options_.limit_all_gathers && freed_.size() >= 2) {
    freed_.front().synchronize();
    freed_.pop_front();
  }
  StreamScope stream(kUnshardStream);
  unit.flat->start_gather();
}

void FullyShardedDataParallel::reshard(Unit& unit) {
  if (!unit.flat || unit.flat->is_sharded()) return;
  unit.flat->free_full();
  // From here on the device may give the memory to another unit
  if (unit.flat->is_sharded() && options_.limit_all_gathers) {
    freed_.emplace_back().record();
  }
}

void FullyShardedDataParallel::reshard_all() {
  for (const auto& unit : units_) reshard(*unit);
}

// Backward reaches units in the reverse order of the ends of their forwards, as
// in PyTorch's _exec_order_utils and fully_shard.
void FullyShardedDataParallel::prefetch_for_backward(const Unit& unit,
                                                     std::size_t nth) {
  if (nth >= unit.finished.size() || unit.finished[nth] == 0) return;
  Unit& next = *finished_[unit.finished[nth] - 1];
  if (next.awaited > 0) unshard(next);
}

void FullyShardedDataParallel::prefetch_for_forward(const Unit& unit) {
  if (unit.begun + 1 < last_begun_.size()) {
    unshard(*last_begun_[unit.begun + 1]);
  }
}

// Gathers of equal sizes in another order would succeed, with wrong values.
void FullyShardedDataParallel::check_order(const Unit& unit) {
  if (!options_.check_execution_order || !is_first_iteration_ ||
      group_.size() == 1) {
    return;
  }
  const std::vector<std::string> all = group_.exchange(unit.flat->name());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    SB_CHECK(all[rank] == all[0], "fsdp: rank 0 gathers unit '", all[0],
             "' where rank ", rank, " gathers '", all[rank],
             "'; all ranks run the same units in the same order");
  }
}

// --- Between steps -----------------------------------------------------------

Tensors FullyShardedDataParallel::parameters() const {
  Tensors all;
  for (const auto& unit : units_) {
    if (!unit->flat) continue;
    for (const NamedTensor& part : unit->flat->trained()) {
      all.push_back(part.tensor);
    }
  }
  return all;
}

void FullyShardedDataParallel::clear_grad() {
  for (const Tensor& shard : parameters()) shard.clear_grad();
  for (const auto& unit : units_) {
    if (!unit->flat) continue;
    unit->flat->drop_reduction();
    unit->flat->drop_grads();
  }
  if (!has_failed_) return;
  graph_.reset();
  reducing_ = nullptr;
  reshard_all();
  has_failed_ = false;
}

double FullyShardedDataParallel::clip_grad_norm_(double max_norm) {
  check_no_failure("clip_grad_norm_");
  PhaseScope phase(Phase::kOptimizer);
  double local = 0;
  for (const Tensor& shard : parameters()) {
    if (shard.grad().defined()) local += sum_of_squares(shard.grad());
  }
  // Replicas hold the same shards: count the squares once
  const double total = groups_.shards == nullptr
                           ? local
                           : sum_over_ranks(*groups_.shards, local, "norm");
  const double norm = std::sqrt(total);
  if (std::isinf(max_norm)) return norm;
  const double factor = clip_factor(norm, max_norm);
  for (const Tensor& shard : parameters()) {
    const Tensor grad = shard.grad();
    if (grad.defined()) scale_in_place(grad, factor);
  }
  return norm;
}

std::vector<const FlatParameter*> FullyShardedDataParallel::units() const {
  std::vector<const FlatParameter*> all;
  for (const auto& unit : units_) {
    if (unit->flat) all.push_back(unit->flat.get());
  }
  return all;
}

zero::HostTraffic FullyShardedDataParallel::host_traffic() const {
  zero::HostTraffic total;
  for (const FlatParameter* unit : units()) {
    total.to_device += unit->host_traffic().to_device;
    total.to_host += unit->host_traffic().to_host;
  }
  return total;
}

}  // namespace shardbook::fsdp
