#include "chapters/02_ddp/reducer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/tensor_storage.h"

namespace shardbook::ddp {
namespace {

constexpr const char* kAfterAFailure =
    " after a backward that failed: gradients hold a part of it; call "
    "clear_grad() of the model and run this step again from its first forward";

std::int64_t mib(double value) {
  return static_cast<std::int64_t>(std::llround(value * (1 << 20)));
}

BucketLimits limits_of(const DdpOptions& options) {
  return {mib(options.first_bucket_mb), mib(options.bucket_cap_mb)};
}

std::vector<BucketItem> items_of(const Tensors& parameters) {
  std::vector<BucketItem> items;
  for (const Tensor& each : parameters) {
    items.push_back({each.bytes(), each.dtype(), each.device()});
  }
  return items;
}

/// Returns "'a', 'b', 'c' and 7 more".
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
    : group_(group),
      options_(options),
      static_graph_(parameters.size()),
      usage_(parameters.size()) {
  slots_.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    slots_[i].index = i;
    slots_[i].name = parameters[i].name;
    slots_[i].parameter = parameters[i].tensor;
  }
  make_buckets(
      initial_buckets(items_of(this->parameters()), limits_of(options)));

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

Tensors Reducer::parameters() const {
  Tensors parameters;
  for (const Slot& slot : slots_) parameters.push_back(slot.parameter);
  return parameters;
}

std::vector<BucketMembers> Reducer::buckets() const {
  std::vector<BucketMembers> assignment;
  for (const Bucket& bucket : buckets_) assignment.push_back(bucket.members());
  return assignment;
}

void Reducer::make_buckets(const std::vector<BucketMembers>& assignment) {
  // Buffers that gradients are views of count as gradients
  MemoryScope kind(options_.gradient_as_bucket_view
                       ? MemoryKind::kGradient
                       : MemoryKind::kCommunication);
  // Move gradients from the old buckets to the new ones
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
  for (const BucketMembers& members : assignment) {
    std::int64_t numel = 0;
    for (const int i : members) numel += slot(i).parameter.numel();
    const auto index = static_cast<int>(buckets_.size());
    const Tensor buffer =
        Tensor::empty({numel}, slot(members[0]).parameter.options());
    buckets_.emplace_back(members, GradBucket{index, buffer});

    // Give each parameter its place
    std::int64_t offset = 0;
    for (const int i : members) {
      Slot& member = slot(i);
      member.bucket = static_cast<std::size_t>(index);
      member.view = buffer.flat_view(offset, member.parameter.shape());
      offset += member.parameter.numel();
      if (options_.gradient_as_bucket_view) {
        set_grad_buffer(member.parameter, member.view);
      }
      if (const Tensor& grad = old_grads[member.index]; grad.defined()) {
        member.view.copy_from(grad);
        member.parameter.set_grad(member.view);
      }
    }
  }
}

std::vector<int> Reducer::arrival_order() const {
  std::vector<int> order(slots_.size());
  std::iota(order.begin(), order.end(), 0);
  // Parameters without a gradient come last, in reverse definition order
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
  // With unused parameters, arrival order differs from step to step
  if (has_rebuilt_ || !has_reduced_ || finds_unused()) return;
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
  make_buckets(
      assign_buckets(items_of(parameters()), order, limits_of(options_)));
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
  for (Bucket& bucket : buckets_) bucket.expect_gradients();
  for (Slot& slot : slots_) slot.is_ready = false;

  // Find the parameters that backward will not reach
  unused_.clear();
  if (finds_unused()) unused_ = find_unused_parameters(outputs, parameters());
  if (options_.static_graph && has_reduced_) {
    static_graph_.expect_uses();
    unused_ = static_graph_.unused();
  }
}

// --- Backward ----------------------------------------------------------------

// Refuse a backward whose reduction is over
void Reducer::check_expecting() {
  std::lock_guard<std::mutex> lock(mutex_);
  SB_CHECK(!has_failed_, "ddp: backward", kAfterAFailure);
  SB_CHECK(is_expecting_, "ddp: rank ", group_.rank(),
           " runs a backward "
           "whose gradients no reduction awaits: another forward or backward "
           "came between it and its forward. Run each backward before the "
           "next forward, or add the losses and run one backward");
}

void Reducer::on_gradient(Slot& slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Also without a reduction: these gradients are reduced later
  usage_.mark_used(slot.index);
  if (!is_expecting_) return;
  if (!is_reducing_) begin_reduction();
  if (!has_rebuilt_) slot.arrival = ++num_arrived_;

  // A static graph is counted once, then replayed
  if (is_counting_uses()) return static_graph_.count_use(slot.index);
  if (options_.static_graph && !static_graph_.is_last_use(slot.index)) return;
  SB_CHECK(!slot.is_ready, "ddp: parameter '", slot.name,
           "' was marked ready twice on rank ", group_.rank(),
           ". It is used by several recomputed blocks, or by a recomputed "
           "block under find_unused_parameters (set static_graph where every "
           "iteration is alike), or a static graph changed");
  mark_ready(slot, /*is_used=*/true);
}

void Reducer::begin_reduction() {
  is_reducing_ = true;
  autograd::at_end_of_backward(
      [this] {
        std::lock_guard<std::mutex> lock(mutex_);
        finish_reduction();
      },
      [this] { has_failed_ = true; });
  for (const int i : unused_) mark_ready(slot(i), /*is_used=*/false);
}

void Reducer::mark_ready(Slot& slot, bool is_used) {
  // Copy the gradient into its bucket
  copy_into_bucket(slot, is_used);
  slot.is_ready = true;
  buckets_[slot.bucket].mark_ready();

  // Launch full buckets, in bucket order
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].is_full()) {
    launch_next_bucket();
  }
}

void Reducer::launch_next_bucket() {
  buckets_[next_bucket_++].launch(divisor_, comm_hook_, group_);
  const bool is_last = next_bucket_ == buckets_.size();
  if (is_last && reduces_usage()) usage_.launch(group_);
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

void Reducer::finish_reduction() {
  if (is_counting_uses()) {
    // The first iteration of a static graph reduces here
    for (Slot& slot : slots_) {
      mark_ready(slot, static_graph_.is_used(slot.index));
    }
  }
  // The next forward reports the missing gradients
  if (next_bucket_ < buckets_.size()) return;

  // Wait for all buckets
  usage_.wait();
  if (reduces_usage()) usage_.read_result();
  for (Bucket& bucket : buckets_) {
    bucket.wait();
    for (const int i : bucket.members()) take_result(slot(i));
  }

  usage_.clear();
  is_expecting_ = is_reducing_ = false;
  has_reduced_ = true;
}

void Reducer::take_result(Slot& slot) {
  if (!usage_.has_users(slot.index)) return;
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
  SB_CHECK(is_clear, "ddp: forward", kAfterAFailure);
  // Launched buckets are still in use by their all-reduce
  for (Bucket& bucket : buckets_) bucket.wait();
  usage_.wait();
  if (is_counting_uses()) static_graph_.forget_uses();
  usage_.clear();
  is_expecting_ = is_reducing_ = has_failed_ = false;
}

bool Reducer::is_in_bucket(const Slot& slot, const Tensor& grad) const {
  return grad.defined() && slot.view.defined() &&
         grad.shares_storage(slot.view);
}

void Reducer::reduce_zeros(double divisor) {
  divisor_ = divisor;
  next_bucket_ = 0;
  usage_.clear();
  while (next_bucket_ < buckets_.size()) {
    buckets_[next_bucket_].buffer().zero();
    launch_next_bucket();
  }
  usage_.wait();
  for (Bucket& bucket : buckets_) bucket.wait();
  has_reduced_ = true;
}

}  // namespace shardbook::ddp
