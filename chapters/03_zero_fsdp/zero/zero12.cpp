#include "chapters/03_zero_fsdp/zero/zero12.h"

#include <algorithm>

#include "comm/coalesce.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {

// --- Construction ------------------------------------------------------------

ZeroStage12::ZeroStage12(Module& module, ProcessGroup& group,
                         const ZeroOptions& options,
                         const std::string& optimizer,
                         const OptimizerOptions& optimizer_options)
    : ZeroOptimizer(module, group, options) {
  groups_ = group_parameters(/*with_frozen=*/false);
  for (std::size_t i = 0; i < groups_.size(); ++i) make_flat(i);
  broadcast_coalesced(group, module.buffers(), 0, "buffers");
  make_buckets();
  make_sharded_optimizer(optimizer, optimizer_options);

  // One hook per parameter
  slots_.resize(groups_.size());
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (const NamedTensor& entry : groups_[i].parameters) {
      const std::size_t parameter = slots_[i].size();
      const int key = entry.tensor.add_accumulate_hook(
          [this, i, parameter](Tensor&) { on_gradient(i, parameter); });
      slots_[i].push_back({entry.tensor, key});
    }
  }
}

ZeroStage12::~ZeroStage12() {
  for (auto& slots : slots_) {
    for (Slot& slot : slots) {
      slot.parameter.remove_accumulate_hook(slot.hook_key);
      set_grad_buffer(slot.parameter, {});
    }
  }
}

void ZeroStage12::make_flat(std::size_t index) {
  ShardGroup& group = groups_[index];
  Flat& flat = flats_.emplace_back();
  group.layout =
      flat_layout(shapes_of(group.parameters), group_.size(),
                  options_.alignment, options_.round_robin_gradients);

  // Parameters become views, with rank 0's values
  const Device& device = RankContext::current().device;
  flat.flat = flatten(group.parameters, group.layout, device);
  group_.broadcast(flat.flat, 0, "parameters").wait();
  const std::int64_t shard = group.layout.shard_numel;
  const std::int64_t begin = group_.rank() * shard;
  flat.own = flat.flat.flat_view(begin, {shard});

  // The updated shard: a view of this rank's part, or a copy on the host
  const TensorOptions kept{flat.flat.dtype(), optimizer_device()};
  group.shard = flat.own;
  if (options_.offload_optimizer) {
    MemoryScope kind(MemoryKind::kParameter);
    group.shard = Tensor::empty({shard}, kept);
    copy_across(group.shard, flat.own, host_traffic_);
    group.on_device = flat.own;
  }

  // Gradients: all of them in stage 1, this rank's shard in stage 2
  MemoryScope kind(MemoryKind::kGradient);
  if (options_.stage == 2) {
    group.grad = Tensor::zeros({shard}, {shard_dtype(kept.dtype), kept.device});
    return;
  }
  flat.flat_grad = Tensor::zeros(flat.flat.shape(), flat.flat.options());
  group.grad = flat.flat_grad.flat_view(begin, {shard});
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    set_grad_buffer(group.parameters[i].tensor,
                    flat.flat_grad.flat_view(group.layout.offsets[i],
                                             group.layout.shapes[i]));
  }
}

void ZeroStage12::make_buckets() {
  // Buckets are full when their first-defined parameter has its gradient
  std::vector<std::pair<std::size_t, Bucket>> sorted;
  const std::vector<NamedTensor> all = module_.named_parameters();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (GradientBucket& plan :
         plan_buckets(groups_[i].layout, options_.reduce_bucket_size)) {
      const std::string& name =
          groups_[i].parameters[plan.parameters.back()].name;
      const auto found = std::find_if(all.begin(), all.end(), [&](auto& entry) {
        return entry.name == name;
      });
      sorted.emplace_back(found - all.begin(),
                          Bucket{i, std::move(plan), {}, {}, {}});
    }
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](auto& a, auto& b) { return a.first > b.first; });
  for (auto& [order, bucket] : sorted) buckets_.push_back(std::move(bucket));
}

// --- The step ----------------------------------------------------------------

void ZeroStage12::finish_gradients() {
  SB_CHECK(num_accumulated_ > 0,
           "zero: step without a reduced gradient; run a backward of a "
           "boundary (set_boundary(true)) before");
}

void ZeroStage12::publish(bool) {
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    const Flat& flat = flats_[i];
    const std::int64_t shard = flat.own.numel();
    const std::int64_t d = group_.size();
    if (!options_.allgather_partitions) {
      for (int owner = 0; owner < d; ++owner) {
        group_
            .broadcast(flat.flat.flat_view(owner * shard, {shard}), owner,
                       "parameters")
            .wait();
      }
      continue;
    }
    const std::int64_t piece =
        std::clamp<std::int64_t>(options_.allgather_bucket_size / d, 1, shard);
    if (piece == shard) {
      group_.all_gather(flat.flat, flat.own, "parameters").wait();
      continue;
    }
    // In pieces: the same columns of every shard, through a buffer
    for (std::int64_t begin = 0; begin < shard; begin += piece) {
      const std::int64_t n = std::min(piece, shard - begin);
      MemoryScope kind(MemoryKind::kCommunication);
      const Tensor buffer = Tensor::empty({d * n}, flat.flat.options());
      group_.all_gather(buffer, flat.own.flat_view(begin, {n}), "parameters")
          .wait();
      // Column by column, this rank's included
      const std::int64_t width = flat.flat.numel() - begin;
      copy_runs(
          {{flat.flat.flat_view(begin, {width}), buffer, d, n, shard, n}});
    }
  }
}

void ZeroStage12::clear_gradients() {
  for (auto& slots : slots_) {
    for (Slot& slot : slots) slot.parameter.clear_grad();
  }
  // Drop the remains of a failed backward
  for (Bucket& bucket : buckets_) {
    for (Work& work : bucket.works) work.wait();
    bucket.works.clear();
    bucket.buffer = bucket.sent = Tensor();
  }
  in_flight_.reset();
  num_accumulated_ = 0;
}

// --- The bill ----------------------------------------------------------------

double ZeroStage12::wire_bytes_of(const Bucket& bucket) const {
  return static_cast<double>(bucket.plan.numel *
                             wire_bytes(flats_[bucket.group].flat.dtype()));
}

double ZeroStage12::published_bytes() const {
  double bytes = 0;
  for (const Flat& flat : flats_) {
    bytes += static_cast<double>(flat.flat.bytes());
  }
  return bytes;
}

double ZeroStage12::predicted_bytes(std::int64_t steps,
                                    std::int64_t micro_steps) const {
  const double d = group_.size();
  double once = published_bytes(), gradients = 0;
  for (const Tensor& buffer : module_.buffers()) {
    once += static_cast<double>(buffer.bytes());
  }
  for (const Bucket& bucket : buckets_) gradients += wire_bytes_of(bucket);
  const double passes = options_.stage == 1 ? 1 : micro_steps;
  const double units = options_.reduce_scatter ? 1 : 2;
  const double norm = 2 * 8;
  const double step = (d - 1) / d * (passes * units * gradients + norm) +
                      predicted_load_bytes();
  return (d - 1) / d * once + static_cast<double>(steps) * step;
}

}  // namespace shardbook::zero
