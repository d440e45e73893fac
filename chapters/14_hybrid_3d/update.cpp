#include "chapters/14_hybrid_3d/update.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "chapters/02_ddp/bucket.h"
#include "core/check.h"
#include "core/context.h"
#include "core/copy_runs.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook::hybrid {
namespace {

/// The group of stages that share the parameter; null for one stage.
std::shared_ptr<ProcessGroup> tied_group(const PipelineModel& model,
                                         const Tensor& parameter) {
  for (const PipelineModel::Shared& each : model.shared()) {
    if (each.parameter.is_same(parameter)) return each.group;
  }
  return nullptr;
}

/// The parameters of all stages of this rank, each once, with its first stage.
std::vector<std::pair<NamedTensor, int>> parameters_by_stage(
    PipelineModel& model) {
  std::vector<std::pair<NamedTensor, int>> all;
  for (int s = 0; s < model.layout().num_stages(); ++s) {
    if (!model.holds(s)) continue;
    for (const NamedTensor& each : model.stage(s).named_parameters()) {
      const auto same = [&](const auto& other) {
        return other.first.tensor.is_same(each.tensor);
      };
      if (std::none_of(all.begin(), all.end(), same)) all.emplace_back(each, s);
    }
  }
  return all;
}

}  // namespace

std::int64_t UpdateBucket::numel() const {
  std::int64_t sum = 0;
  for (const NamedTensor& each : parameters) sum += each.tensor.numel();
  return sum;
}

std::int64_t UpdateBucket::updated_numel() const {
  return own.defined() ? own.numel() : numel();
}

Update::Update(const Options& options, const HybridOptions& setup,
               PipelineModel& model, const RankLayers& layers,
               const Groups& groups)
    : groups_(groups), is_sharded_(setup.zero_stage == 1) {
  make_buckets(model, layers, setup);
  Tensors updated;
  for (UpdateBucket& bucket : buckets_) {
    if (!is_sharded_) {
      for (const NamedTensor& each : bucket.parameters) {
        updated.push_back(each.tensor);
      }
      continue;
    }
    std::vector<std::int64_t> numels;
    for (const NamedTensor& each : bucket.parameters) {
      numels.push_back(each.tensor.numel());
    }
    bucket.layout =
        zero::flat_layout(numels, bucket.data->size(), /*alignment=*/2);
    bucket.flat = zero::flatten(bucket.parameters, bucket.layout,
                                RankContext::current().device);
    const std::int64_t shard = bucket.layout.shard();
    bucket.own = bucket.flat.flat_view(bucket.data->rank() * shard, {shard});
    updated.push_back(bucket.own);
  }
  optimizer_ = make_optimizer(options.optimizer, std::move(updated),
                              options.optimizer_options);
  optimizer_->keep_master_copies();
  if (setup.accumulate_f32) sum_in_f32();
}

Update::~Update() {
  for (const auto& [parameter, key] : hooks_) {
    parameter.remove_accumulate_hook(key);
  }
}

// Each gradient leaves its parameter at once, so none is summed in 16 bits.
void Update::sum_in_f32() {
  const MemoryScope kind(MemoryKind::kGradient);
  for (UpdateBucket& bucket : buckets_) {
    bucket.gradient_bytes = 4;
    for (const NamedTensor& each : bucket.parameters) {
      Tensor& sum = sums_[each.name];
      sum = Tensor::zeros(each.tensor.shape(), {DType::kF32, Device()});
      hooks_.emplace_back(each.tensor,
                          each.tensor.add_accumulate_hook([&sum](Tensor& from) {
                            const NoGrad no_grad;
                            add_into(sum, to_dtype(from.grad(), DType::kF32));
                            from.clear_grad();
                          }));
    }
  }
}

Tensor Update::gradient(const NamedTensor& parameter) const {
  const auto found = sums_.find(parameter.name);
  if (found != sums_.end()) return found->second;
  // Zeros where no backward has reached it
  if (!parameter.tensor.grad().defined()) {
    const MemoryScope kind(MemoryKind::kGradient);
    parameter.tensor.set_grad(parameter.tensor.zeros_like());
  }
  return parameter.tensor.grad();
}

void Update::make_buckets(PipelineModel& model, const RankLayers& layers,
                          const HybridOptions& setup) {
  // Parameters that are summed over the same groups, by their first member
  std::vector<UpdateBucket> kinds;
  for (const auto& [each, stage] : parameters_by_stage(model)) {
    UpdateBucket kind;
    if (setup.overlap_grad_reduce) kind.stage = stage;
    kind.tied = tied_group(model, each.tensor);
    kind.data = moe::is_expert(each.name) ? &groups_.experts : &groups_.data;
    kind.is_replicated = layers.is_whole(each.name);
    kind.is_partial = layers.is_partial(each.name);
    const auto found =
        std::find_if(kinds.begin(), kinds.end(), [&](const auto& other) {
          return other.stage == kind.stage && other.tied == kind.tied &&
                 other.data == kind.data &&
                 other.is_replicated == kind.is_replicated &&
                 other.is_partial == kind.is_partial;
        });
    if (found != kinds.end()) {
      found->parameters.push_back(each);
      continue;
    }
    kind.gradient_bytes = static_cast<double>(dtype_bytes(each.tensor.dtype()));
    // ZeRO-1 counts each rank's own shard
    kind.counts = (is_sharded_ || kind.data->rank() == 0) &&
                  (!kind.is_replicated || groups_.tp.rank() == 0) &&
                  (kind.tied == nullptr || kind.tied->rank() == 0);

    kind.parameters.push_back(each);
    kinds.push_back(std::move(kind));
  }
  // Cut each kind into buckets of a size that travels well
  for (const UpdateBucket& kind : kinds) {
    std::vector<ddp::BucketItem> items;
    for (const NamedTensor& each : kind.parameters) {
      items.push_back({each.tensor.bytes(), each.tensor.dtype(), Device()});
    }
    std::vector<int> order(items.size());
    std::iota(order.begin(), order.end(), 0);
    const ddp::BucketLimits limits{setup.bucket_bytes, setup.bucket_bytes};
    for (const ddp::BucketMembers& members :
         ddp::assign_buckets(items, order, limits)) {
      UpdateBucket bucket = kind;
      bucket.parameters.clear();
      for (const int i : members) {
        bucket.parameters.push_back(
            kind.parameters[static_cast<std::size_t>(i)]);
      }
      buckets_.push_back(std::move(bucket));
    }
  }
}

Tensors Update::gradients_of(const UpdateBucket& bucket) const {
  if (is_sharded_) return {bucket.grad};
  Tensors grads;
  for (const NamedTensor& each : bucket.parameters) {
    grads.push_back(gradient(each));
  }
  return grads;
}

// --- Full buckets ------------------------------------------------------------

FullBuckets::FullBuckets(std::vector<std::size_t> bucket_of,
                         std::size_t num_buckets)
    : bucket_of_(std::move(bucket_of)),
      gradients_(bucket_of_.size()),
      num_incomplete_(num_buckets),
      filled_(num_buckets) {
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    if (std::count(bucket_of_.begin(), bucket_of_.end(), bucket) > 0) {
      order_.push_back(bucket);
    }
  }
}

std::vector<std::size_t> FullBuckets::count(std::size_t parameter) {
  const std::size_t bucket = bucket_of_[parameter];
  if (is_first_step_) {
    gradients_.count_use(parameter);
    filled_[bucket] = ++num_counted_;
    return {};
  }
  if (gradients_.is_last_use(parameter)) num_incomplete_[bucket] -= 1;
  // A full bucket waits for those that leave before it
  const std::size_t first = next_;
  while (next_ < order_.size() && num_incomplete_[order_[next_]] == 0) ++next_;
  return {order_.begin() + static_cast<std::ptrdiff_t>(first),
          order_.begin() + static_cast<std::ptrdiff_t>(next_)};
}

std::vector<std::size_t> FullBuckets::end_step() {
  const std::vector<std::size_t> rest(
      order_.begin() + static_cast<std::ptrdiff_t>(next_), order_.end());
  if (is_first_step_) {
    is_first_step_ = false;
    // A bucket that the last micro-batch does not fill comes last
    for (std::size_t i = 0; i < bucket_of_.size(); ++i) {
      if (!gradients_.is_used(i)) filled_[bucket_of_[i]] = num_counted_ + 1;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](auto a, auto b) { return filled_[a] < filled_[b]; });
  }
  gradients_.expect_uses();
  std::fill(num_incomplete_.begin(), num_incomplete_.end(), 0);
  for (const std::size_t bucket : bucket_of_) num_incomplete_[bucket] += 1;
  next_ = 0;
  return rest;
}

// --- Sums --------------------------------------------------------------------

void Update::overlap(const std::function<bool()>& adds_last) {
  std::vector<std::size_t> bucket_of;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].data->size() == 1) continue;
    for (const NamedTensor& each : buckets_[b].parameters) {
      const std::size_t i = bucket_of.size();
      bucket_of.push_back(b);
      hooks_.emplace_back(
          each.tensor,
          each.tensor.add_accumulate_hook([=, this, name = each.name](Tensor&) {
            SB_CHECK(!buckets_[b].sent.defined(), "--overlap-grad-reduce: '",
                     name,
                     "' got a gradient after its bucket had left; each step "
                     "must use every parameter equally often");
            if (!adds_last()) return;
            for (const std::size_t full : full_->count(i)) send(buckets_[full]);
          }));
    }
  }
  full_.emplace(std::move(bucket_of), buckets_.size());
}

void Update::send(UpdateBucket& bucket) {
  const NoGrad no_grad;
  Tensor& all = bucket.sent;
  {
    const MemoryScope kind(is_sharded_ ? MemoryKind::kCommunication
                                       : MemoryKind::kGradient);
    all = Tensor::zeros({is_sharded_ ? bucket.flat.numel() : bucket.numel()},
                        gradient(bucket.parameters[0]).options());
  }
  std::vector<CopyRun> there;
  std::int64_t next = 0;
  for (const NamedTensor& each : bucket.parameters) {
    const Tensor grad = gradient(each);
    there.push_back({all.flat_view(next, grad.shape()), grad});
    next += grad.numel();
  }
  copy_runs(there);
  if (!is_sharded_) {
    // Gradients are views of the sum
    for (std::size_t i = 0; i < there.size(); ++i) {
      const NamedTensor& each = bucket.parameters[i];
      const auto found = sums_.find(each.name);
      if (found == sums_.end()) {
        each.tensor.set_grad(there[i].target);
      } else {
        found->second = there[i].target;
      }
    }
    bucket.work = bucket.data->all_reduce(all, ReduceOp::kSum, "gradients");
    return;
  }
  // The whole gradients are no longer needed
  there.clear();
  for (const NamedTensor& each : bucket.parameters) each.tensor.clear_grad();
  const MemoryScope kind(MemoryKind::kGradient);
  bucket.grad = Tensor::empty(bucket.own.shape(), all.options());
  bucket.work = bucket.data->reduce_scatter(bucket.grad, all, ReduceOp::kSum,
                                            "gradients");
}

void Update::reduce() {
  const PhaseScope phase(Phase::kOptimizer);
  if (full_) {
    for (const std::size_t b : full_->end_step()) send(buckets_[b]);
  }
  // Over samples and tokens
  for (UpdateBucket& bucket : buckets_) {
    if (is_sharded_ && !bucket.sent.defined()) send(bucket);
    if (bucket.sent.defined()) {
      bucket.work.wait();
      bucket.sent = Tensor();
    } else {
      sum_over_ranks(*bucket.data, gradients_of(bucket), "gradients");
    }
  }
  // Then over tokens that were cut inside the tp group
  for (const UpdateBucket& bucket : buckets_) {
    if (bucket.is_partial) {
      sum_over_ranks(groups_.tp, gradients_of(bucket), "sequence_parallel");
    }
  }
  // Then over stages with the same parameter
  for (const UpdateBucket& bucket : buckets_) {
    if (bucket.tied != nullptr) {
      sum_over_ranks(*bucket.tied, gradients_of(bucket), "tied gradient");
    }
  }
}

double Update::sum_of_squares() const {
  const PhaseScope phase(Phase::kOptimizer);
  double total = 0;
  // Every rank computes all of its squares, so that ranks of one stage do the
  // same work
  for (const UpdateBucket& bucket : buckets_) {
    double squares = 0;
    for (const Tensor& grad : gradients_of(bucket)) {
      squares += shardbook::sum_of_squares(grad);
    }
    if (bucket.counts) total += squares;
  }
  return total;
}

void Update::apply(double factor) {
  std::size_t i = 0;
  for (const UpdateBucket& bucket : buckets_) {
    for (const Tensor& grad : gradients_of(bucket)) {
      optimizer_->step_one(i++, grad, factor);
    }
  }
  forget();
  gather();
}

void Update::gather() {
  if (!is_sharded_) return;
  const PhaseScope phase(Phase::kOptimizer);
  for (const UpdateBucket& bucket : buckets_) {
    bucket.data->all_gather(bucket.flat, bucket.own, "parameters").wait();
  }
}

void Update::add_to(TrainingState& state) {
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const UpdateBucket& bucket = buckets_[i];
    if (!is_sharded_) {
      add_whole(state, bucket.parameters, *optimizer_);
      continue;
    }
    for (std::size_t j = 0; j < bucket.parameters.size(); ++j) {
      for (const zero::OwnedPart& own :
           bucket.layout.parts(static_cast<int>(j))) {
        if (own.owner != bucket.data->rank() || own.numel == 0) continue;
        StatePart part;
        part.name = bucket.parameters[j].name;
        part.whole = bucket.parameters[j].tensor.shape();
        part.begin = own.begin;
        part.values = bucket.own.flat_view(own.shard_begin, {own.numel});
        part.optimizer = optimizer_.get();
        part.slot = i;
        part.slot_begin = own.shard_begin;
        state.parts.push_back(std::move(part));
      }
    }
  }
}

void Update::forget() {
  for (UpdateBucket& bucket : buckets_) {
    bucket.grad = Tensor();
    for (const NamedTensor& each : bucket.parameters) each.tensor.clear_grad();
  }
  for (auto& [name, sum] : sums_) sum.zero();
}

}  // namespace shardbook::hybrid
