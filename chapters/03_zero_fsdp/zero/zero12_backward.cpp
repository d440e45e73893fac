// Gradients on their way: into buckets, over the wire, into this rank's shard.

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"

namespace shardbook::zero {

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
      Tensor::empty({bucket.plan.numel}, flats_[bucket.group].flat.options());
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

}  // namespace shardbook::zero
