#include "chapters/03_zero_fsdp/zero/zero.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "chapters/02_ddp/ddp.h"
#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "chapters/common/sharded/parts.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {
namespace {

void check_options(const ZeroOptions& options) {
  SB_CHECK(options.stage >= 1 && options.stage <= 3, "zero: stage ",
           options.stage, "; give 1, 2 or 3");
  SB_CHECK(
      options.reduce_bucket_size >= 1 && options.allgather_bucket_size >= 1,
      "zero: buckets of ", options.reduce_bucket_size, " and ",
      options.allgather_bucket_size, "; give at least 1 element");
  SB_CHECK(options.loss_scale > 0, "zero: loss_scale ", options.loss_scale,
           "; give a number above 0");
  SB_CHECK(options.divide_before == 0 ||
               (options.divide_before > 0 && options.stage <= 2 &&
                !options.reduce_scatter),
           "zero: divide_before ", options.divide_before, " with stage ",
           options.stage, options.reduce_scatter ? " and reduce_scatter" : "",
           "; ranks divide before they receive their parts: give 0, or stage 1 "
           "or 2 without reduce_scatter");
  SB_CHECK(options.max_live_parameters >= 0 &&
               options.max_reuse_distance >= 0 && options.sub_group_size >= 1,
           "zero: max_live_parameters ", options.max_live_parameters,
           ", max_reuse_distance ", options.max_reuse_distance,
           ", sub_group_size ", options.sub_group_size,
           "; give at least 0, 0 and 1 elements");
  SB_CHECK(!options.accumulate_f32 || options.stage >= 2,
           "zero: accumulate_f32 with stage ", options.stage,
           ", which keeps no shards of gradients; give stage 2 or 3");
  SB_CHECK(!options.offload_optimizer || options.stage >= 2,
           "zero: offload_optimizer with stage ", options.stage,
           "; gradients stream to the host as shards, from stage 2 on");
  SB_CHECK(options.master_copies ||
               (options.stage == 2 && options.offload_optimizer),
           "zero: no master copies with stage ", options.stage,
           "; only stage 2 with offload_optimizer goes without them");
  SB_CHECK(!options.offload_parameters ||
               (options.stage == 3 && options.offload_optimizer),
           "zero: offload_parameters with stage ", options.stage,
           "; needs stage 3 and offload_optimizer");
}

}  // namespace

ZeroOptimizer::ZeroOptimizer(Module& module, ProcessGroup& group,
                             const ZeroOptions& options)
    : module_(module),
      group_(group),
      options_(options),
      loss_scale_(options.loss_scale) {
  check_options(options);
  ddp::check_same_model("zero", module, group);
  for (const NamedTensor& entry : module.named_parameters()) {
    if (!entry.tensor.requires_grad()) frozen_.push_back(entry);
  }
}

ZeroOptimizer::~ZeroOptimizer() = default;

std::vector<ZeroOptimizer::ShardGroup> ZeroOptimizer::group_parameters(
    bool with_frozen) {
  std::vector<ShardGroup> groups;
  for (const NamedTensor& entry : module_.named_parameters()) {
    const bool is_trained = entry.tensor.requires_grad();
    if (!is_trained && !with_frozen) continue;
    auto found = std::find_if(groups.begin(), groups.end(), [&](auto& group) {
      return group.is_trained == is_trained &&
             group.parameters[0].tensor.dtype() == entry.tensor.dtype();
    });
    if (found == groups.end()) {
      groups.emplace_back().is_trained = is_trained;
      found = std::prev(groups.end());
    }
    found->parameters.push_back(entry);
  }
  std::stable_sort(groups.begin(), groups.end(), [](auto& a, auto& b) {
    return a.is_trained > b.is_trained;
  });
  SB_CHECK(!groups.empty() && groups[0].is_trained, "zero: no parameter of ",
           module_.type_name(), " requires a gradient; run the module itself");
  return groups;
}

DType ZeroOptimizer::shard_dtype(DType gradient) const {
  return options_.accumulate_f32 && dtype_bytes(gradient) == 2 ? DType::kF32
                                                               : gradient;
}

std::int64_t ZeroOptimizer::wire_bytes(DType dtype) const {
  return static_cast<std::int64_t>(dtype_bytes(options_.wire.value_or(dtype)));
}

Tensor ZeroOptimizer::sent_as(const Tensor& bucket) const {
  if (options_.wire.value_or(bucket.dtype()) == bucket.dtype()) return bucket;
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor sent =
      Tensor::empty(bucket.shape(), {*options_.wire, bucket.device()});
  sent.copy_from(bucket);
  return sent;
}

void ZeroOptimizer::make_sharded_optimizer(
    const std::string& name, const OptimizerOptions& optimizer_options) {
  Tensors shards;
  for (const ShardGroup& group : groups_) {
    if (group.is_trained) shards.push_back(group.shard);
  }
  optimizer_name_ = name;
  optimizer_ = make_optimizer(name, shards, optimizer_options);
  if (options_.master_copies) optimizer_->keep_master_copies();
}

std::int64_t ZeroOptimizer::shard_numel() const {
  std::int64_t numel = 0;
  for (const ShardGroup& group : groups_) numel += group.shard.numel();
  return numel;
}

double ZeroOptimizer::predicted_load_bytes() const {
  const double d = group_.size();
  return (d - 1) / d * published_bytes();
}

// --- The step ----------------------------------------------------------------

std::vector<NamedTensor> ZeroOptimizer::own_gradients() {
  check_usable("own_gradients");
  {
    PhaseScope phase(Phase::kOptimizer);
    NoGrad no_grad;
    finish_gradients();
  }
  std::vector<NamedTensor> own;
  for (const ShardGroup& group : groups_) {
    if (!group.is_trained) continue;
    for (const OwnedPart& part : group.layout.parts_of_rank(group_.rank())) {
      own.push_back(
          {group.parameters[part.parameter].name, part.of_shard(group.grad)});
    }
  }
  return own;
}

double ZeroOptimizer::sum_of_squares() const {
  double total = 0;
  for (const ShardGroup& group : groups_) {
    if (group.is_trained) total += shardbook::sum_of_squares(group.grad);
  }
  return total;
}

std::array<double, 2> ZeroOptimizer::sums_of_squares(
    const std::function<bool(const std::string& name)>& is_second) const {
  std::array<double, 2> sums = {0, 0};
  for (const ShardGroup& group : groups_) {
    if (!group.is_trained) continue;
    std::int64_t begin = 0, end = 0;
    std::size_t which = 0;
    const auto add = [&] {
      if (begin == end) return;
      sums[which] +=
          shardbook::sum_of_squares(group.grad.flat_view(begin, {end - begin}));
    };
    for (const OwnedPart& part : group.layout.parts_of_rank(group_.rank())) {
      const std::size_t own =
          is_second(group.parameters[part.parameter].name) ? 1 : 0;
      if (own != which || part.shard_begin != end) {
        add();
        begin = part.shard_begin;
        which = own;
      }
      end = part.shard_begin + part.numel;
    }
    add();
  }
  return sums;
}

void ZeroOptimizer::check_usable(const char* what) const {
  SB_CHECK(!has_failed_backward_, "zero: ", what,
           " after a backward that failed: gradients hold a part of it; call "
           "clear_grad() and run the step again from its first micro-batch");
  SB_CHECK(!is_updating_, "zero: ", what,
           " after a step that failed while it updated parameters: ranks may "
           "hold different ones; load a checkpoint");
}

void ZeroOptimizer::check_frozen() const {
  if (!RankContext::current().grad_enabled) return;
  for (const NamedTensor& parameter : frozen_) {
    SB_CHECK(!parameter.tensor.requires_grad(), "zero: '", parameter.name,
             "' was frozen at construction, so no shard has its gradient; "
             "construct ZeRO anew to train it");
  }
}

void ZeroOptimizer::watch_backward(std::function<void()> ended) {
  if (is_in_backward_) return;
  check_usable("backward");
  is_in_backward_ = true;
  autograd::at_end_of_backward(
      [this, ended = std::move(ended)] {
        ended();
        is_in_backward_ = false;
      },
      [this] {
        is_in_backward_ = false;
        has_failed_backward_ = true;
      });
}

void ZeroOptimizer::clear_grad() {
  clear_gradients();
  has_failed_backward_ = false;
}

double ZeroOptimizer::step() {
  check_usable("step");
  double norm = 0;
  {
    PhaseScope phase(Phase::kOptimizer);
    NoGrad no_grad;
    finish_gradients();
    // Each element is in one shard, and padding is zero: the sum over ranks
    // counts everything once. All ranks see an overflow on one: inf and nan
    // survive the sum
    norm = std::sqrt(sum_over_ranks(group_, sum_of_squares(), "norm")) /
           loss_scale_;
  }
  return step(norm);
}

double ZeroOptimizer::step(double norm) {
  check_usable("step");
  PhaseScope phase(Phase::kOptimizer);
  NoGrad no_grad;
  finish_gradients();

  // Skip the step when a gradient has overflowed
  const bool may_overflow =
      options_.check_grad_overflow ||
      std::any_of(groups_.begin(), groups_.end(), [](auto& group) {
        return group.is_trained && group.shard.dtype() == DType::kF16;
      });
  if (may_overflow && !std::isfinite(norm)) {
    num_skipped_ += 1;
    clear_gradients();
    return norm;
  }

  // Unscale and clip with one factor, on the way into the update
  double factor = 1 / loss_scale_;
  if (options_.clip > 0) factor *= clip_factor(norm, options_.clip);
  is_updating_ = true;
  for (std::size_t i = 0; i < optimizer_->slots().size(); ++i) {
    update_shard(i, factor);
  }
  steps_done_ += 1;

  // Publish the new parameters, drop the gradients
  finish_bringing_back();
  publish(/*with_frozen=*/false);
  is_updating_ = false;
  clear_gradients();
  return norm;
}

// Each sub-group is updated by an optimizer of its own, on views of the shard and
// of its state. The whole step counts once.
void ZeroOptimizer::update_shard(std::size_t index, double factor) {
  const ShardGroup& group = groups_[index];
  const std::int64_t numel = group.shard.numel();
  const std::int64_t most = options_.sub_group_size;
  if (numel <= most) {
    optimizer_->step_one(index, group.grad, factor);
    bring_back(group, 0, numel);
    return;
  }
  OptimizerSlot& slot = optimizer_->slots()[index];
  // State that the optimizer would otherwise create in its first step
  const DType dtype =
      group.shard.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  while (slot.state.size() < optimizer_->state_names().size()) {
    MemoryScope kind(MemoryKind::kOptimizerState);
    slot.state.push_back(Tensor::zeros({numel}, {dtype, group.shard.device()}));
  }
  for (std::int64_t begin = 0; begin < numel; begin += most) {
    const Shape shape{std::min(most, numel - begin)};
    const auto part =
        make_optimizer(optimizer_name_, {group.shard.flat_view(begin, shape)},
                       optimizer_->options());
    OptimizerSlot& views = part->slots()[0];
    views.step = slot.step;
    for (const Tensor& each : slot.state) {
      views.state.push_back(each.flat_view(begin, shape));
    }
    if (slot.master.defined()) {
      views.master = slot.master.flat_view(begin, shape);
    }
    part->step_one(0, group.grad.flat_view(begin, shape), factor);
    bring_back(group, begin, shape[0]);
  }
  slot.step += 1;
}

void ZeroOptimizer::bring_back(const ShardGroup& group, std::int64_t begin,
                               std::int64_t numel) {
  if (!group.on_device.defined()) return;
  const Shape shape{numel};
  returning_.push_back(begin_copy(group.on_device.flat_view(begin, shape),
                                  group.shard.flat_view(begin, shape),
                                  host_traffic_));
}

void ZeroOptimizer::finish_bringing_back() {
  for (const Event& each : returning_) each.wait();
  returning_.clear();
}

// --- State -------------------------------------------------------------------

TrainingState ZeroOptimizer::state() {
  TrainingState state;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    for (const OwnedPart& own : group.layout.parts_of_rank(group_.rank())) {
      const auto& [name, parameter] = group.parameters[own.parameter];
      StatePart& part = state.parts.emplace_back();
      part.name = name;
      part.whole = parameter.shape();
      part.begin = own.begin;
      part.values = own.of_shard(group.shard);
      if (!group.is_trained) continue;
      part.optimizer = optimizer_.get();
      part.slot = i;
      part.slot_begin = own.shard_begin;
    }
  }
  state.loaded = [this](const std::map<std::string, double>&) {
    for (const OptimizerSlot& slot : optimizer_->slots()) {
      steps_done_ = std::max(steps_done_, slot.step);
    }
    for (const ShardGroup& group : groups_) {
      if (group.is_trained) bring_back(group, 0, group.shard.numel());
    }
    finish_bringing_back();
    publish(/*with_frozen=*/true);
    if (is_updating_) clear_grad();  // of a step that failed
    is_updating_ = false;
  };
  return state;
}

std::vector<NamedTensor> ZeroOptimizer::full_parameters(bool rank0_only) {
  NoGrad no_grad;
  const Device& host = RankContext::current().host();
  const bool is_kept = !rank0_only || group_.rank() == 0;
  const std::int64_t d = group_.size();
  std::map<std::string, Tensor> full;
  for (const ShardGroup& group : groups_) {
    // Room for the whole tensors
    Tensors targets;
    for (const NamedTensor& each : group.parameters) {
      if (!is_kept) break;
      MemoryScope kind(memory_kind_of(group.shard));
      targets.push_back(
          Tensor::empty(each.tensor.shape(), {group.shard.dtype(), host}));
      full[each.name] = targets.back();
    }
    // Columns of all shards, a bucket at a time
    const std::int64_t shard = group.shard.numel();
    const std::int64_t piece =
        std::clamp<std::int64_t>(options_.allgather_bucket_size / d, 1,
                                 std::max<std::int64_t>(shard, 1));
    for (std::int64_t begin = 0; begin < shard; begin += piece) {
      const std::int64_t n = std::min(piece, shard - begin);
      MemoryScope kind(MemoryKind::kCommunication);
      const Tensor columns =
          Tensor::empty({d * n}, {group.shard.dtype(), Device()});
      const Tensor own = columns.flat_view(group_.rank() * n, {n});
      own.copy_from(group.shard.flat_view(begin, {n}));
      group_.all_gather(columns, own, "state").wait();
      for (std::size_t p = 0; p < targets.size(); ++p) {
        for (const OwnedPart& part : group.layout.parts(p)) {
          const std::int64_t from = std::max(part.shard_begin, begin);
          const std::int64_t to =
              std::min(part.shard_begin + part.numel, begin + n);
          if (from >= to) continue;
          const Shape shape{to - from};
          targets[p]
              .flat_view(part.begin + from - part.shard_begin, shape)
              .copy_from(
                  columns.flat_view(part.owner * n + from - begin, shape));
        }
      }
    }
  }

  // In definition order; frozen parameters that are not in shards are copied
  std::vector<NamedTensor> named;
  if (!is_kept) return named;
  for (const NamedTensor& entry : module_.named_parameters()) {
    Tensor& whole = full[entry.name];
    if (!whole.defined()) {
      whole = Tensor::empty(entry.tensor.shape(), {entry.tensor.dtype(), host});
      whole.copy_from(entry.tensor);
    }
    named.push_back({entry.name, whole});
  }
  return named;
}

std::unique_ptr<ZeroOptimizer> make_zero(
    Module& module, ProcessGroup& group, const ZeroOptions& options,
    const std::string& optimizer, const OptimizerOptions& optimizer_options) {
  std::unique_ptr<ZeroOptimizer> zero;
  if (options.stage == 3) {
    zero = std::make_unique<ZeroStage3>(module, group, options);
  } else {
    zero = std::make_unique<ZeroStage12>(module, group, options);
  }
  zero->make_sharded_optimizer(optimizer, optimizer_options);
  return zero;
}

}  // namespace shardbook::zero
