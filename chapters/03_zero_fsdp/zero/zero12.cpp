#include "chapters/03_zero_fsdp/zero/zero12.h"

#include <algorithm>

#include "comm/coalesce.h"
#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {

// --- Construction ------------------------------------------------------------

ZeroStage12::ZeroStage12(Module& module, ProcessGroup& group,
                         const ZeroOptions& options)
    : ZeroOptimizer(module, group, options) {
  groups_ = group_parameters(/*with_frozen=*/false);
  for (std::size_t i = 0; i < groups_.size(); ++i) make_flat(i);
  broadcast_coalesced(group, module.buffers(), 0, "buffers");
  make_buckets();

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
  group.layout =
      flat_layout(shapes_of(group.parameters), group_.size(),
                  options_.alignment, options_.round_robin_gradients);

  // Parameters become views, with rank 0's values
  RankContext& context = RankContext::current();
  const Tensor flat = flatten(group.parameters, group.layout, context.device);
  flats_.push_back(flat);
  group_.broadcast(flat, 0, "parameters").wait();
  const std::int64_t shard = group.layout.shard_numel;
  const std::int64_t begin = group_.rank() * shard;
  const Tensor own = flat.flat_view(begin, {shard});

  // The updated shard: a view of this rank's part, or a copy on the host
  const TensorOptions kept{flat.dtype(), options_.offload_optimizer
                                             ? context.host()
                                             : context.device};
  group.shard = own;
  if (options_.offload_optimizer) {
    MemoryScope kind(MemoryKind::kParameter);
    group.shard = Tensor::empty({shard}, kept);
    copy_across(group.shard, own, host_traffic_);
    group.on_device = own;
  }

  // Gradients: all of them in stage 1, this rank's shard in stage 2
  MemoryScope kind(MemoryKind::kGradient);
  if (options_.stage == 2) {
    group.grad = Tensor::zeros({shard}, {shard_dtype(kept.dtype), kept.device});
    return;
  }
  const Tensor gradients = Tensor::zeros(flat.shape(), flat.options());
  group.grad = gradients.flat_view(begin, {shard});
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    set_grad_buffer(
        group.parameters[i].tensor,
        gradients.flat_view(group.layout.offsets[i], group.layout.shapes[i]));
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

// --- Gradients: into buckets, over the wire, into this rank's shard -----------

void ZeroStage12::on_gradient(std::size_t group, std::size_t parameter) {
  if (!is_in_backward()) begin_backward();
  if (!reduces_now()) return;
  Slot& slot = slots_[group][parameter];
  SB_CHECK(!slot.has_arrived, "zero: parameter '",
           groups_[group].parameters[parameter].name,
           "' received two gradients in one backward; it is used by several "
           "recomputed blocks, which stages 1 and 2 cannot reduce");
  slot.has_arrived = true;
  drain();
}

void ZeroStage12::begin_backward() {
  SB_CHECK(options_.stage == 2 || !is_boundary_ || num_accumulated_ == 0,
           "zero: a second backward at the boundary before step; say "
           "set_boundary(false) before all micro-steps but the last");
  watch_backward([this] { end_of_backward(); });
  next_bucket_ = 0;
  for (auto& slots : slots_) {
    for (Slot& slot : slots) slot.has_arrived = slot.is_copied = false;
  }
}

// Copies gradients into the open bucket; full buckets leave, in their order.
void ZeroStage12::drain() {
  while (next_bucket_ < buckets_.size()) {
    Bucket& bucket = buckets_[next_bucket_];
    bool is_full = true;
    for (const std::size_t parameter : bucket.plan.parameters) {
      const Slot& entry = slots_[bucket.group][parameter];
      if (entry.has_arrived && !entry.is_copied) copy_in(bucket, parameter);
      is_full = is_full && entry.is_copied;
    }
    if (!is_full) return;
    launch(bucket);
    next_bucket_ += 1;
  }
}

void ZeroStage12::open(Bucket& bucket) {
  MemoryScope kind(MemoryKind::kCommunication);
  bucket.buffer =
      Tensor::empty({bucket.plan.numel}, flats_[bucket.group].options());
  for (const BucketPiece& piece : bucket.plan.pieces) {
    if (piece.parameter != kPadding) continue;
    // Padding is zero in gradients too: norms and overflow checks include it
    bucket.buffer.flat_view(piece.bucket_begin, {piece.numel}).zero();
  }
}

double ZeroStage12::divisor_before() const {
  return options_.divide_before > 0 ? options_.divide_before : group_.size();
}

void ZeroStage12::copy_in(Bucket& bucket, std::size_t parameter) {
  Slot& entry = slots_[bucket.group][parameter];
  entry.is_copied = true;
  // Divide before the sum: a sum of many ranks must not overflow
  const double share = 1.0 / divisor_before();
  const Tensor grad = entry.parameter.grad();
  if (bucket.plan.is_large && grad.defined()) {
    const Tensor flat = grad.flat_view(0, {grad.numel()});
    scale_into(flat, flat, share);
    bucket.buffer = flat;
  } else {
    if (!bucket.buffer.defined()) open(bucket);
    for (const BucketPiece& piece : bucket.plan.pieces) {
      if (piece.parameter != parameter) continue;
      const Shape shape{piece.numel};
      const Tensor place = bucket.buffer.flat_view(piece.bucket_begin, shape);
      if (grad.defined()) {
        scale_into(place, grad.flat_view(piece.begin, shape), share);
      } else {
        place.zero();
      }
    }
  }
  // The full gradient is no longer needed
  if (options_.stage == 2) entry.parameter.clear_grad();
}

void ZeroStage12::launch(Bucket& bucket) {
  const std::string label =
      "bucket " + std::to_string(&bucket - buckets_.data());
  const GradientBucket& plan = bucket.plan;
  Event filled;
  filled.record();
  {
    StreamScope stream(options_.overlap_comm ? kReduceStream : kComputeStream);
    filled.wait();
    bucket.sent = sent_as(bucket.buffer);
    if (!options_.reduce_scatter) {
      bucket.works.push_back(
          group_.all_reduce(bucket.sent, ReduceOp::kSum, label));
    } else {
      const std::int64_t common = plan.scatter_numel * group_.size();
      if (common > 0) {
        const Tensor block = bucket.sent.flat_view(0, {common});
        bucket.works.push_back(group_.reduce_scatter(
            block.flat_view(group_.rank() * plan.scatter_numel,
                            {plan.scatter_numel}),
            block, ReduceOp::kSum, label));
      }
      for (const OwnedRange& range : plan.rest) {
        bucket.works.push_back(
            group_.reduce(bucket.sent.flat_view(range.begin, {range.numel}),
                          range.owner, ReduceOp::kSum, label));
      }
    }
  }

  // Finish the other bucket, to fill it while this one travels
  finish_in_flight();
  in_flight_ = next_bucket_;
  if (!options_.overlap_comm) finish_in_flight();
}

void ZeroStage12::finish_in_flight() {
  if (!in_flight_) return;
  finish(buckets_[*in_flight_]);
  in_flight_.reset();
}

void ZeroStage12::finish(Bucket& bucket) {
  Event done;
  {
    StreamScope stream(options_.overlap_comm ? kReduceStream : kComputeStream);
    for (Work& work : bucket.works) work.wait();
    bucket.works.clear();
    if (!bucket.sent.is_same(bucket.buffer)) {
      bucket.buffer.copy_from(bucket.sent);
    }
    const double left = group_.size() / divisor_before();
    if (left != 1) scale_into(bucket.buffer, bucket.buffer, 1 / left);
    take_own_part(bucket);
    done.record();
  }
  bucket.buffer = bucket.sent = Tensor();
  done.wait();
}

// A rank copies much from one bucket and nothing from the next, one shard in
// total. Observers receive an equal share per bucket, with the same sum, so all
// ranks take equal virtual time and one may be simulated for all.
void ZeroStage12::take_own_part(const Bucket& bucket) {
  const Tensor& shard = groups_[bucket.group].grad;
  // A large gradient of stage 1 was reduced in place
  if (bucket.buffer.shares_storage(shard)) return;
  std::vector<CopyRun> runs;
  for (const BucketPiece& piece : runs_of(bucket.plan, group_.rank())) {
    const Shape shape{piece.numel};
    runs.push_back({shard.flat_view(piece.shard_begin, shape),
                    bucket.buffer.flat_view(piece.bucket_begin, shape)});
  }
  if (options_.offload_optimizer) {
    take_runs(runs, num_accumulated_ > 0, host_traffic_);
    return;
  }
  const Shape none{0};  // sets the device if this rank owns nothing
  runs.push_back({shard.flat_view(0, none), shard.flat_view(0, none)});
  const double share = static_cast<double>(bucket.plan.numel) / group_.size();
  num_accumulated_ > 0 ? add_runs(runs, share) : copy_runs(runs, 1, share);
}

void ZeroStage12::end_of_backward() {
  if (!reduces_now()) return;
  // Parameters without a gradient count as zero
  for (auto& slots : slots_) {
    for (Slot& slot : slots) slot.has_arrived = true;
  }
  drain();
  finish_in_flight();
  num_accumulated_ += 1;
}

// --- The step ----------------------------------------------------------------

void ZeroStage12::finish_gradients() {
  SB_CHECK(num_accumulated_ > 0,
           "zero: step without a reduced gradient; run a backward of a "
           "boundary (set_boundary(true)) before");
}

void ZeroStage12::publish(bool) {
  const std::int64_t d = group_.size();
  for (const Tensor& flat : flats_) {
    const std::int64_t shard = flat.numel() / d;
    const Tensor own = flat.flat_view(group_.rank() * shard, {shard});
    if (!options_.allgather_partitions) {
      for (int owner = 0; owner < d; ++owner) {
        group_
            .broadcast(flat.flat_view(owner * shard, {shard}), owner,
                       "parameters")
            .wait();
      }
      continue;
    }
    const std::int64_t piece =
        std::clamp<std::int64_t>(options_.allgather_bucket_size / d, 1, shard);
    if (piece == shard) {
      group_.all_gather(flat, own, "parameters").wait();
      continue;
    }
    // In pieces: the same columns of every shard, through a buffer
    for (std::int64_t begin = 0; begin < shard; begin += piece) {
      const std::int64_t n = std::min(piece, shard - begin);
      MemoryScope kind(MemoryKind::kCommunication);
      const Tensor buffer = Tensor::empty({d * n}, flat.options());
      group_.all_gather(buffer, own.flat_view(begin, {n}), "parameters").wait();
      // Column by column, this rank's included
      const std::int64_t width = flat.numel() - begin;
      copy_runs({{flat.flat_view(begin, {width}), buffer, d, n, shard, n}});
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
                             wire_bytes(flats_[bucket.group].dtype()));
}

double ZeroStage12::published_bytes() const {
  double bytes = 0;
  for (const Tensor& flat : flats_) {
    bytes += static_cast<double>(flat.bytes());
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
