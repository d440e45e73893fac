#include "chapters/03_zero_fsdp/fsdp/flat_parameter.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"
#include "core/copy_runs.h"
#include "core/inplace.h"
#include "core/tensor_storage.h"

namespace shardbook::fsdp {
namespace {

Tensor empty(std::int64_t numel, DType dtype, const Device& device,
             MemoryKind kind) {
  MemoryScope scope(kind);
  return Tensor::empty({numel}, {dtype, device});
}

std::int64_t bytes(std::int64_t numel, DType dtype) {
  return numel * static_cast<std::int64_t>(dtype_bytes(dtype));
}

}  // namespace

FlatParameter::FlatParameter(const std::string& name,
                             std::vector<NamedTensor> parameters,
                             const UnitGroups& groups,
                             const UnitOptions& options, bool per_parameter,
                             bool use_orig_params)
    : name_(name), groups_(groups), options_(options) {
  // v2 puts trained parameters first: their gradients are a prefix
  auto is_trained = [](const NamedTensor& p) {
    return p.tensor.requires_grad();
  };
  if (per_parameter) {
    std::stable_partition(parameters.begin(), parameters.end(), is_trained);
  }
  const int d = groups.shards ? groups.shards->size() : 1;
  const std::vector<Shape> shapes = zero::shapes_of(parameters);
  layout_ = per_parameter ? zero::row_layout(shapes, d)
                          : zero::flat_layout(shapes, d);

  // One dtype, and (v1) trained or frozen as a whole
  dtype_ = parameters[0].tensor.dtype();
  compute_dtype_ = options.mixed_precision.param_dtype.value_or(dtype_);
  reduce_dtype_ = options.mixed_precision.reduce_dtype.value_or(compute_dtype_);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [path, tensor] = parameters[i];
    SB_CHECK(tensor.dtype() == dtype_, "fsdp: unit '", name, "' has '",
             parameters[0].name, "' in ", dtype_name(dtype_), " and '", path,
             "' in ", dtype_name(tensor.dtype()),
             "; a unit has parameters of one dtype");
    SB_CHECK(per_parameter || use_orig_params ||
                 tensor.requires_grad() == is_trained(parameters[0]),
             "fsdp: unit '", name, "' mixes the frozen and the trained ('",
             parameters[0].name, "', '", path,
             "'); freeze whole units, or set use_orig_params");
    names_.push_back(path);
    requires_grad_.push_back(tensor.requires_grad());
    if (!tensor.requires_grad()) continue;
    grad_numel_ = per_parameter ? layout_.offsets[i] / d + layout_.chunk[i]
                                : layout_.shard_numel;
  }
  is_whole_ = d == 1 && compute_dtype_ == dtype_ && !options.offload_params;
  make_shard(parameters);
  make_trained(per_parameter || use_orig_params);
}

void FlatParameter::make_shard(const std::vector<NamedTensor>& parameters) {
  RankContext& context = RankContext::current();
  const Device& device = context.device;
  shard_ = empty(layout_.shard_numel, dtype_,
                 options_.offload_params ? context.host() : device,
                 MemoryKind::kParameter);
  shard_.zero();  // padding is zero
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const OwnedPart own = own_part(i);
    own.of_shard(shard_).copy_from(own.of_whole(parameters[i].tensor));
  }

  // Replace the parameters by views of the full array
  full_ = is_whole_ ? shard_
                    : empty(layout_.full_numel(), compute_dtype_, device,
                            MemoryKind::kParameter);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    leaves_.push_back(view(full_, i));
    leaves_.back().set_requires_grad(requires_grad_[i]);
  }
  if (is_whole_) {
    state_ = State::kFull;
  } else {
    release_storage(full_);
  }
}

void FlatParameter::check_frozen() const {
  if (!RankContext::current().grad_enabled) return;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    SB_CHECK(requires_grad_[i] || !leaves_[i].requires_grad(), "fsdp: '",
             names_[i], "' was frozen at construction, so no shard has its ",
             "gradient; construct FSDP anew to train it");
  }
}

void FlatParameter::make_trained(bool per_parameter) {
  if (!needs_grad()) return;
  if (!per_parameter) {
    trained_.push_back({name_, shard_});
    trained_parts_.push_back({0, 0, 0, 0, layout_.shard_numel});
    return;
  }
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (!requires_grad_[i]) continue;
    trained_parts_.push_back(own_part(i));
    trained_.push_back({names_[i], trained_parts_.back().of_shard(shard_)});
  }
}

// --- Gather --------------------------------------------------------------------

void FlatParameter::start_gather() {
  if (state_ != State::kSharded) return;
  // Memory for the message: in v1 it is the full array itself
  Tensor message = full_;
  if (layout_.per_parameter) {
    message = staging_ = empty(layout_.full_numel(), compute_dtype_,
                               full_.device(), MemoryKind::kCommunication);
  } else {
    restore_storage(full_);
  }
  // Cast (or fetch) into the own part of the message, then gather in place
  Tensor input = shard_;
  if (compute_dtype_ != dtype_ || options_.offload_params || ranks() == 1) {
    const std::int64_t n = layout_.shard_numel;
    input = message.flat_view(shard_rank() * n, {n});
    input.copy_from(shard_);
    if (options_.offload_params) host_traffic_.to_device += shard_.bytes();
  }
  if (groups_.shards != nullptr) {
    gather_work_ =
        groups_.shards->all_gather(message, input, "gather " + name_);
  }
  // Set last: if the lines above throw, the unit is still in shards
  state_ = State::kGathering;
}

void FlatParameter::finish_gather() {
  if (state_ != State::kGathering) return;
  gather_work_.wait();
  if (layout_.per_parameter) {
    restore_storage(full_);
    copy_out(staging_, full_);
    staging_ = Tensor();
  }
  state_ = State::kFull;
}

void FlatParameter::free_full() {
  if (is_whole_) return;
  if (state_ == State::kGathering) {
    gather_work_.wait();
    staging_ = Tensor();
  }
  if (state_ != State::kSharded) release_storage(full_);
  state_ = State::kSharded;
}

// v2: from rank order to parameter order
void FlatParameter::copy_out(const Tensor& message, const Tensor& full) const {
  const ManyCopies copies("copy out", full, message);
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    const std::int64_t n = layout_.chunk[i];
    for (std::int64_t r = 0; r < ranks(); ++r) {
      copies.copy(layout_.offsets[i] + r * n,
                  r * layout_.shard_numel + layout_.offsets[i] / ranks(), n);
    }
  }
}

// v2: back to rank order; each rank has `part` elements of the message
void FlatParameter::copy_in(const Tensor& full, const Tensor& message,
                            std::int64_t part) const {
  const ManyCopies copies("copy in", message, full);
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    if (!requires_grad_[i]) continue;
    const std::int64_t n = layout_.chunk[i];
    for (std::int64_t r = 0; r < ranks(); ++r) {
      copies.copy(r * part + layout_.offsets[i] / ranks(),
                  layout_.offsets[i] + r * n, n);
    }
  }
}

// --- Gradients -----------------------------------------------------------------

void FlatParameter::prepare_grads() {
  if (!needs_grad() || grads_.defined()) return;
  grads_ = empty(ranks() * grad_numel_, compute_dtype_, full_.device(),
                 MemoryKind::kGradient);
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (requires_grad_[i]) set_grad_buffer(leaves_[i], view(grads_, i));
  }
}

bool FlatParameter::has_grads() const {
  return std::any_of(leaves_.begin(), leaves_.end(),
                     [](const Tensor& leaf) { return leaf.grad().defined(); });
}

void FlatParameter::drop_grads() {
  for (const Tensor& leaf : leaves_) {
    leaf.clear_grad();
    set_grad_buffer(leaf, {});
  }
  grads_ = Tensor();
}

void FlatParameter::drop_reduction() {
  reduce_work_.wait();
  message_ = output_ = Tensor();
}

void FlatParameter::start_reduce(double divide_before) {
  prepare_grads();
  // Padding and parameters without a gradient count as zero
  std::int64_t end = 0;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (layout_.per_parameter && !requires_grad_[i]) break;
    const std::int64_t begin = layout_.offsets[i];
    grads_.flat_view(end, {begin - end}).zero();
    const Tensor place = view(grads_, i), grad = leaves_[i].grad();
    end = begin + place.numel();
    if (!grad.defined()) {
      place.zero();
    } else if (!grad.shares_storage(grads_)) {
      place.copy_from(grad);
    }
  }
  grads_.flat_view(end, {grads_.numel() - end}).zero();
  Tensor grads = grads_;
  drop_grads();

  // Divide first: the sum of many ranks must not overflow
  scale_into(grads, grads, 1 / divide_before);
  message_ = grads;
  if (sends_copy()) {
    message_ = empty(grads.numel(), reduce_dtype_, grads.device(),
                     MemoryKind::kCommunication);
    if (layout_.per_parameter && ranks() > 1) {
      copy_in(grads, message_, grad_numel_);
    } else {
      message_.copy_from(grads);
    }
  }
  grads = Tensor();
  output_ = message_;
  if (ranks() == 1) return;
  output_ = empty(
      grad_numel_, reduce_dtype_, message_.device(),
      output_is_grad() ? MemoryKind::kGradient : MemoryKind::kCommunication);
  reduce_work_ = groups_.shards->reduce_scatter(
      output_, message_, ReduceOp::kSum, "reduce " + name_);
}

void FlatParameter::finish_reduce(double divide_after) {
  reduce_work_.wait();
  message_ = Tensor();
  if (groups_.replicas != nullptr) {
    groups_.replicas->all_reduce(output_, ReduceOp::kSum, "replicas " + name_)
        .wait();
  }
  scale_into(output_, output_, 1 / divide_after);
  take(output_);
  output_ = Tensor();
}

// Adds to the gradients of the tensors that the optimizer updates
void FlatParameter::take(const Tensor& output) {
  if (options_.offload_params) host_traffic_.to_host += output.bytes();
  const bool is_first = std::none_of(
      trained_.begin(), trained_.end(),
      [](const NamedTensor& t) { return t.tensor.grad().defined(); });
  Tensor grad = output;
  if (output_is_grad()) {
    set_memory_kind(grad, MemoryKind::kGradient);
  } else {
    grad = empty(output.numel(), dtype_, shard_.device(),
                 is_first ? MemoryKind::kGradient : MemoryKind::kCommunication);
    grad.copy_from(output);
  }
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    const Tensor& target = trained_[i].tensor;
    const Tensor part = trained_parts_[i].of_shard(grad);
    if (target.grad().defined()) {
      add_into(target.grad(), part);
    } else {
      target.set_grad(part);
    }
  }
}

// --- State ---------------------------------------------------------------------

Tensor FlatParameter::view(const Tensor& full, std::size_t i) const {
  return full.flat_view(layout_.offsets[i], layout_.shapes[i]);
}

Tensor FlatParameter::gather(const Tensor& shard,
                             const std::string& label) const {
  const Device& device = full_.device();
  Tensor input = shard;
  if (shard.device() != device) {
    input = empty(shard.numel(), shard.dtype(), device, MemoryKind::kParameter);
    input.copy_from(shard);
  }
  Tensor message = empty(layout_.full_numel(), shard.dtype(), device,
                         MemoryKind::kParameter);
  if (groups_.shards == nullptr) {
    message.copy_from(input);
    return message;
  }
  groups_.shards->all_gather(message, input, label + " " + name_).wait();
  if (!layout_.per_parameter) return message;
  const Tensor full =
      set_memory_kind(message.empty_like(), MemoryKind::kParameter);
  copy_out(message, full);
  return full;
}

void FlatParameter::scatter(const Tensor& full, const Tensor& shard) const {
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    const OwnedPart own = own_part(i);
    own.of_shard(shard).copy_from(own.of_whole(view(full, i)));
  }
}

// --- Bytes ---------------------------------------------------------------------

std::int64_t FlatParameter::full_bytes() const {
  return is_whole_ ? 0 : bytes(layout_.full_numel(), compute_dtype_);
}

std::int64_t FlatParameter::message_bytes() const {
  return bytes(ranks() * grad_numel_, reduce_dtype_);
}

bool FlatParameter::sends_copy() const {
  return reduce_dtype_ != compute_dtype_ ||
         (layout_.per_parameter && ranks() > 1);
}

std::int64_t FlatParameter::shard_grad_bytes() const {
  return bytes(grad_numel_, dtype_);
}

bool FlatParameter::output_is_grad() const {
  return reduce_dtype_ == dtype_ && !options_.offload_params;
}

}  // namespace shardbook::fsdp
