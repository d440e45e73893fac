#include "chapters/02_ddp/reducer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include "core/autograd.h"
#include "core/backward_end.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/tensor_storage.h"

namespace shardbook::ddp {
namespace {

std::int64_t mib(double value) {
  return static_cast<std::int64_t>(std::llround(value * (1 << 20)));
}

std::vector<BucketItem> items_of(const std::vector<NamedTensor>& parameters) {
  std::vector<BucketItem> items;
  for (const auto& [name, tensor] : parameters) {
    items.push_back({tensor.bytes(), tensor.dtype(), tensor.device()});
  }
  return items;
}

/// "'a', 'b', 'c' and 7 more".
std::string list_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kShown) {
    text += " and " + std::to_string(names.size() - kShown) + " more";
  }
  return text;
}

}  // namespace

Reducer::Reducer(std::vector<NamedTensor> parameters, ProcessGroup& group,
                 const DdpOptions& options)
    : group_(group), options_(options), is_used_(parameters.size()) {
  slots_.reserve(parameters.size());
  for (const auto& [name, tensor] : parameters) {
    Slot& slot = slots_.emplace_back();
    slot.name = name;
    slot.parameter = tensor;
  }
  make_buckets(initial_buckets(
      items_of(parameters),
      {mib(options.first_bucket_mb), mib(options.bucket_cap_mb)}));

  // One hook per parameter
  for (Slot& slot : slots_) {
    slot.hook_key = slot.parameter.add_accumulate_hook(
        [this, &slot](Tensor&) { on_gradient(slot); });
  }
}

Reducer::~Reducer() {
  for (Slot& slot : slots_) {
    slot.parameter.remove_accumulate_hook(slot.hook_key);
    if (options_.gradient_as_bucket_view) set_grad_buffer(slot.parameter, {});
  }
}

// --- Buckets -----------------------------------------------------------------

void Reducer::make_buckets(const std::vector<Bucket>& assignment) {
  // Buffers that are the gradients are booked as gradients
  MemoryScope kind(options_.gradient_as_bucket_view
                       ? MemoryKind::kGradient
                       : MemoryKind::kCommunication);
  // Gradients that lie in the old buckets move on to the new ones
  std::vector<Tensor> old_grads(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Tensor grad = slots_[i].parameter.grad();
    if (is_in_bucket(slots_[i], grad)) old_grads[i] = grad;
    slots_[i].view = Tensor();
    if (options_.gradient_as_bucket_view) {
      set_grad_buffer(slots_[i].parameter, {});
    }
  }
  buckets_.clear();
  assignment_ = assignment;
  for (const Bucket& members : assignment_) {
    std::int64_t numel = 0;
    for (const int i : members) {
      numel += slots_[static_cast<std::size_t>(i)].parameter.numel();
    }
    const auto first = static_cast<std::size_t>(members[0]);
    BucketState bucket;
    bucket.buffer = Tensor::empty({numel}, slots_[first].parameter.options());
    std::int64_t offset = 0;
    for (const int i : members) {
      Slot& slot = slots_[static_cast<std::size_t>(i)];
      slot.bucket = buckets_.size();
      slot.view = bucket.buffer.flat_view(offset, slot.parameter.shape());
      offset += slot.parameter.numel();
      if (options_.gradient_as_bucket_view) {
        set_grad_buffer(slot.parameter, slot.view);
      }
      if (const Tensor& grad = old_grads[static_cast<std::size_t>(i)];
          grad.defined()) {
        slot.view.copy_from(grad);
        slot.parameter.set_grad(slot.view);
      }
    }
    buckets_.push_back(std::move(bucket));
  }
}

std::vector<int> Reducer::arrival_order() const {
  std::vector<int> order(slots_.size());
  std::iota(order.begin(), order.end(), 0);
  // Parameters without a gradient come last, the last-defined first
  std::reverse(order.begin(), order.end());
  auto key = [&](int i) {
    const int arrival = slots_[static_cast<std::size_t>(i)].arrival;
    return arrival > 0 ? arrival : num_arrived_ + 1;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return key(a) < key(b); });
  return order;
}

void Reducer::rebuild_buckets() {
  // With unused parameters the arrival order of one step says little
  if (has_rebuilt_ || num_reductions_ == 0 || finds_unused()) return;
  has_rebuilt_ = true;

  // Agree on rank 0's order
  std::vector<int> order = arrival_order();
  if (group_.size() > 1) {
    MemoryScope kind(MemoryKind::kCommunication);
    const Tensor message = Tensor::from_values<std::int32_t>(
        order, {static_cast<std::int64_t>(order.size())});
    group_.broadcast(message, 0, "bucket order").wait();
    if (!message.is_meta()) order = message.to_vector<std::int32_t>();
  }

  // Now the small first bucket holds the gradients that come first
  std::vector<NamedTensor> parameters;
  for (const Slot& slot : slots_) {
    parameters.push_back({slot.name, slot.parameter});
  }
  make_buckets(assign_buckets(
      items_of(parameters), order,
      {mib(options_.first_bucket_mb), mib(options_.bucket_cap_mb)}));
}

// --- Forward -----------------------------------------------------------------

void Reducer::check_finished() {
  if (!is_reducing_) return;
  if (has_failed_) {
    forget_failed_backward();
    return;
  }
  std::vector<std::string> missing;
  for (const Slot& slot : slots_) {
    if (!slot.is_ready) missing.push_back(slot.name);
  }
  SB_FAIL(
      "ddp: expected to have finished reduction in the prior iteration "
      "before starting a new one; on rank ",
      group_.rank(), " no gradient came for ", list_of(missing),
      ". Set find_unused_parameters when a forward does not use all "
      "parameters; parameters must not be frozen after construction");
}

void Reducer::expect_reduction(const Tensors& outputs, double divisor) {
  is_expecting_ = true;
  divisor_ = divisor;
  next_bucket_ = 0;
  for (BucketState& bucket : buckets_) bucket.num_missing = 0;
  for (Slot& slot : slots_) {
    slot.is_ready = false;
    slot.missing_uses = slot.uses;
    buckets_[slot.bucket].num_missing += 1;
  }

  // Find the parameters that backward will not reach
  unused_.clear();
  if (options_.static_graph) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (num_reductions_ > 0 && slots_[i].uses == 0) {
        unused_.push_back(static_cast<int>(i));
      }
    }
  } else if (options_.find_unused_parameters) {
    std::unordered_set<const void*> reached;
    for (const Tensor& leaf : autograd::reachable_leaves(outputs)) {
      reached.insert(leaf.id());
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (reached.count(slots_[i].parameter.id()) == 0) {
        unused_.push_back(static_cast<int>(i));
      }
    }
  }
}

// --- Backward ----------------------------------------------------------------

// Refuse a backward whose reduction is over
void Reducer::check_expecting() {
  std::lock_guard<std::mutex> lock(mutex_);
  SB_CHECK(!has_failed_,
           "ddp: backward after a backward that failed: gradients hold a part "
           "of it; call clear_grad() of the model and run this step again from "
           "its first forward");
  SB_CHECK(is_expecting_, "ddp: rank ", group_.rank(),
           " runs a backward "
           "whose gradients no reduction awaits: another forward or backward "
           "came between it and its forward. Run each backward before the "
           "next forward, or add the losses and run one backward");
}

void Reducer::on_gradient(Slot& slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Even without a reduction: gradients that accumulate now are reduced later
  is_used_[static_cast<std::size_t>(&slot - slots_.data())] = 1;
  if (!is_expecting_) return;
  if (!is_reducing_) begin_reduction();
  if (!has_rebuilt_) slot.arrival = ++num_arrived_;

  // A static graph is counted once, then replayed
  if (is_counting_uses()) {
    slot.uses += 1;
    return;
  }
  if (options_.static_graph && --slot.missing_uses > 0) return;
  SB_CHECK(!slot.is_ready && slot.missing_uses >= 0, "ddp: parameter '",
           slot.name, "' was marked ready twice on rank ", group_.rank(),
           ". It is used by several recomputed blocks, or by a recomputed "
           "block under find_unused_parameters (set static_graph where every "
           "iteration is alike), or a static graph changed");
  mark_ready(slot, /*is_used=*/true);
}

void Reducer::begin_reduction() {
  is_reducing_ = true;
  autograd::on_end_of_backward(
      [this] {
        std::lock_guard<std::mutex> lock(mutex_);
        finish_reduction();
      },
      [this] { has_failed_ = true; });
  for (const int i : unused_) {
    mark_ready(slots_[static_cast<std::size_t>(i)], /*is_used=*/false);
  }
}

void Reducer::mark_ready(Slot& slot, bool is_used) {
  // Copy the gradient into its bucket
  copy_into_bucket(slot, is_used);
  slot.is_ready = true;
  buckets_[slot.bucket].num_missing -= 1;

  // Launch full buckets, in bucket order
  while (next_bucket_ < buckets_.size() &&
         buckets_[next_bucket_].num_missing == 0) {
    launch(next_bucket_++);
    if (next_bucket_ == buckets_.size()) start_usage_reduction();
  }
}

void Reducer::copy_into_bucket(Slot& slot, bool is_used) {
  // Divide before the sum: a sum of many ranks must not overflow
  const double factor = comm_hook_ ? 1 : 1 / divisor_;
  Tensor grad = slot.parameter.grad();
  if (!grad.defined()) {
    slot.view.zero();
    return;
  }

  if (!is_used && is_in_bucket(slot, grad)) {
    // The old gradient must survive if no rank used the parameter
    MemoryScope kind(MemoryKind::kGradient);
    grad = grad.clone();
    slot.parameter.set_grad(grad);
  }
  scale_into(slot.view, grad, factor);
  if (options_.gradient_as_bucket_view && is_used) {
    slot.parameter.set_grad(slot.view);
  }
}

void Reducer::launch(std::size_t bucket) {
  BucketState& state = buckets_[bucket];
  if (comm_hook_) {
    state.finish =
        comm_hook_({static_cast<int>(bucket), bucket + 1 == buckets_.size(),
                    state.buffer, divisor_},
                   group_);
    return;
  }
  // Backward goes on while the bucket travels
  auto work = std::make_shared<Work>(group_.all_reduce(
      state.buffer, ReduceOp::kSum, "bucket " + std::to_string(bucket)));
  state.finish = [work] { work->wait(); };
}

// Counts the ranks that used each parameter: if none did, it keeps its
// gradient.
void Reducer::start_usage_reduction() {
  if (!finds_unused() && !is_counting_uses()) return;
  MemoryScope kind(MemoryKind::kCommunication);
  usage_ = Tensor();  // frees the memory that the next one takes
  usage_ = Tensor::from_values<std::int32_t>(
      is_used_, {static_cast<std::int64_t>(slots_.size())});
  usage_work_ = group_.all_reduce(usage_, ReduceOp::kSum, "used parameters");
}

void Reducer::finish_reduction() {
  if (is_counting_uses()) {
    // The first iteration of a static graph reduces here
    for (Slot& slot : slots_) mark_ready(slot, slot.uses > 0);
  }
  // The next forward says which gradients are missing
  if (next_bucket_ < buckets_.size()) return;

  // Wait for all buckets
  usage_work_.wait();
  if (finds_unused() || is_counting_uses()) {
    num_users_ = usage_.is_meta() ? is_used_ : usage_.to_vector<std::int32_t>();
  }
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    buckets_[bucket].finish();
    buckets_[bucket].finish = nullptr;
    for (const int i : assignment_[bucket]) {
      take_result(slots_[static_cast<std::size_t>(i)]);
    }
  }

  std::fill(is_used_.begin(), is_used_.end(), 0);
  is_expecting_ = false;
  is_reducing_ = false;
  num_reductions_ += 1;
}

void Reducer::take_result(Slot& slot) {
  const auto i = static_cast<std::size_t>(&slot - slots_.data());
  if (!num_users_.empty() && num_users_[i] == 0) return;
  const Tensor grad = slot.parameter.grad();
  if (options_.gradient_as_bucket_view) {
    if (!is_in_bucket(slot, grad)) slot.parameter.set_grad(slot.view);
  } else if (grad.defined()) {
    grad.copy_from(slot.view);
  } else {
    MemoryScope kind(MemoryKind::kGradient);
    slot.parameter.set_grad(slot.view.clone());
  }
}

void Reducer::forget_failed_backward() {
  const bool is_clear = std::all_of(
      slots_.begin(), slots_.end(),
      [](const Slot& slot) { return !slot.parameter.grad().defined(); });
  SB_CHECK(is_clear,
           "ddp: forward after a backward that failed: gradients hold a part "
           "of it; call clear_grad() of the model and run this step again from "
           "its first forward");
  // Buckets that have left are still in use by their all-reduce
  for (BucketState& bucket : buckets_) {
    if (bucket.finish) bucket.finish();
    bucket.finish = nullptr;
  }
  usage_work_.wait();
  if (is_counting_uses()) {
    for (Slot& slot : slots_) slot.uses = 0;
  }
  std::fill(is_used_.begin(), is_used_.end(), 0);
  is_expecting_ = is_reducing_ = has_failed_ = false;
}

bool Reducer::is_in_bucket(const Slot& slot, const Tensor& grad) const {
  return grad.defined() && slot.view.defined() &&
         grad.shares_storage(slot.view);
}

void Reducer::reduce_zeros(double divisor) {
  divisor_ = divisor;
  std::fill(is_used_.begin(), is_used_.end(), 0);
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    buckets_[bucket].buffer.zero();
    launch(bucket);
  }
  start_usage_reduction();
  usage_work_.wait();
  for (BucketState& bucket : buckets_) {
    bucket.finish();
    bucket.finish = nullptr;
  }
  num_reductions_ += 1;
}

}  // namespace shardbook::ddp
