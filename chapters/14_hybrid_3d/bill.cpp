#include "chapters/14_hybrid_3d/bill.h"

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/13_moe/bill.h"
#include "chapters/common/pipeline/recompute.h"

namespace shardbook::hybrid {
namespace {

/// Bytes that a rank of n sends for an all-reduce; half of it for an all-gather
/// or a reduce-scatter.
double all_reduce(double n, double bytes) { return 2 * (n - 1) / n * bytes; }

/// Elements of a bucket, and of the part that goes on after the first sum.
struct BucketElements {
  double whole = 0, kept = 0;
};
BucketElements elements_of(const UpdateBucket& bucket) {
  if (!bucket.flat.defined()) {
    const auto whole = static_cast<double>(bucket.numel());
    return {whole, whole};
  }
  return {static_cast<double>(bucket.flat.numel()),
          static_cast<double>(bucket.own.numel())};
}

/// Whether activations are left to a run on shapes: of attention over ranks, and
/// of tokens that are cut.
bool is_left_to_shapes(const BillSizes& z) {
  return z.c() > 1 || z.how->sequence_parallel ||
         z.how->recompute == "attention";
}
void leave_to_shapes(MemoryBill& bill, const BillSizes& z) {
  if (z.options->steps == 0) return;
  bill[MemoryKind::kActivation] = kNotPredicted;
  // A rank's own tokens lie beside all of them
  if (z.c() > 1) bill[MemoryKind::kInput] = kNotPredicted;
  bill[MemoryKind::kCommunication] = kNoClaim;
}

}  // namespace

BillSizes bill_sizes(const Options& options, const HybridOptions& how,
                     const RankLayers& layers,
                     const pipeline::Schedule& schedule,
                     const std::vector<int>& cuts, int pp_rank) {
  BillSizes sizes;
  sizes.options = &options;
  sizes.how = &how;
  sizes.layers = &layers;
  sizes.rows =
      static_cast<double>(options.batch / (how.dp * how.micro_batches));
  sizes.element = static_cast<double>(dtype_bytes(options.dtype));
  sizes.sum = options.dtype == DType::kF64 ? 8 : 4;
  const int last = layers.list->size() - 1;
  const pipeline::Recomputed recomputed(schedule, pp_rank,
                                        how.recomputed_stages());
  for (int b = 0; b < schedule.num_micro_batches; ++b) {
    for (int stage = 0; stage < schedule.num_stages; ++stage) {
      const pipeline::Place& place = schedule.place(b, stage);
      if (place.rank != pp_rank) continue;
      const bool again = recomputed.contains(b, place.chunk);
      for (int layer = cuts[static_cast<std::size_t>(stage)];
           layer < cuts[static_cast<std::size_t>(stage) + 1]; ++layer) {
        double& runs = layer == 0      ? sizes.embeddings
                       : layer == last ? sizes.heads
                                       : sizes.blocks;
        double& reruns = layer == 0      ? sizes.embeddings_again
                         : layer == last ? sizes.heads_again
                                         : sizes.blocks_again;
        runs += 1;
        if (again) reruns += 1;
      }
    }
  }
  if (how.recompute == "blocks") sizes.blocks_again = sizes.blocks;
  if (how.recompute == "attention") sizes.attentions_again = sizes.blocks;
  return sizes;
}

// --- Bytes -------------------------------------------------------------------

double expert_bytes(const BillSizes& z) {
  const moe::MoeOptions moe = z.how->moe();
  moe::BillSizes groups;
  groups.ep = z.how->ep, groups.t = z.how->tp;
  const auto slots = static_cast<double>(moe::capacity(
      static_cast<std::int64_t>(z.tokens()), moe.gate, /*is_training=*/true));
  // Half of the messages are those of forward
  return z.element * (z.blocks + z.blocks_again / 2) *
         moe::layer_elements(moe, z.how->experts, slots, z.h(), groups);
}

double layer_bytes(const BillSizes& z) {
  const bool has_experts = z.how->has_experts();
  double bytes = has_experts ? expert_bytes(z) : 0;
  const double passes = z.heads + z.heads_again;  // of the loss
  if (z.t() > 1) {
    const double x = z.tokens() * z.h() * z.element;
    if (z.how->sequence_parallel) {
      // Gathers and scatters, half an all-reduce each: four forward and six
      // backward per block; one of each for embedding and head. Experts have
      // one of each in the place of an MLP's two and three
      const double halves = (has_experts ? 7 : 10) * z.blocks +
                            (has_experts ? 3 : 4) * z.blocks_again +
                            2 * (z.embeddings + z.heads) + z.embeddings_again +
                            z.heads_again;
      bytes += all_reduce(z.t(), halves / 2 * x);
    } else {
      // f and g of attention and MLP; g behind the embedding, f before the head
      const double sums =
          (has_experts ? 1 : 2) * (2 * z.blocks + z.blocks_again) +
          z.embeddings + z.embeddings_again + z.heads;
      bytes += all_reduce(z.t(), sums * x);
    }
    // Largest logit, logit of the target, sum of exponentials
    bytes += all_reduce(z.t(), 3 * z.tokens() * z.sum * passes);
  }
  if (z.c() > 1) {
    const double whole = z.tokens() * z.c() * z.h() / z.t();
    const sequence_parallel::LayerElements layer =
        sequence_parallel::layer_elements(z.how->sequence(), z.c(), whole);
    bytes +=
        (z.blocks + z.blocks_again + z.attentions_again) * layer.forward *
            z.element +
        z.blocks * (layer.backward * z.element + layer.backward_sums * z.sum);
    bytes += all_reduce(z.c(), 2 * z.sum * passes);  // loss, and its tokens
  }
  return bytes;
}

double update_bytes(const BillSizes& z) {
  double bytes = 0;
  for (const UpdateBucket& bucket : *z.buckets) {
    const BucketElements of = elements_of(bucket);
    const double grad = bucket.gradient_bytes;
    // All-reduce, or reduce-scatter of gradients and all-gather of parameters
    const double second = bucket.flat.defined() ? z.element : grad;
    bytes += all_reduce(bucket.data->size(), of.whole * (grad + second) / 2);
    if (bucket.is_partial) bytes += all_reduce(z.t(), of.kept * grad);
    if (bucket.tied != nullptr) {
      bytes += all_reduce(bucket.tied->size(), of.kept * grad);
    }
  }
  return bytes;
}

double loss_and_norm_bytes(const BillSizes& z) {
  return all_reduce(z.world(), 16);
}

double gather_bytes(const BillSizes& z) {
  double bytes = 0;
  for (const UpdateBucket& bucket : *z.buckets) {
    if (!bucket.flat.defined()) continue;
    bytes += all_reduce(bucket.data->size(),
                        static_cast<double>(bucket.flat.bytes()) / 2);
  }
  return bytes;
}

double step_bytes(const BillSizes& z) {
  return layer_bytes(z) + update_bytes(z) + loss_and_norm_bytes(z);
}

// --- Memory ------------------------------------------------------------------

MemoryBill memory(const BillSizes& z, const pipeline::Schedule& schedule,
                  PipelineModel& model, pipeline::Feed& on_shapes,
                  const pipeline::EngineOptions& engine, int pp_rank) {
  const Options& options = *z.options;
  MemoryBill bill = pipeline::schedule_bill(options, schedule, pp_rank, model,
                                            on_shapes, engine);
  // RSA's mask outlives the micro-batch on which the rest was measured
  const bool has_mask = z.c() > 1 && z.how->cp_kind == "rsa";
  if (has_mask && options.steps > 0) bill[MemoryKind::kInput] = kNotPredicted;
  double updated = 0, flats = 0;
  double whole = 0, shards = 0, most = 0, sums = 0;
  for (const UpdateBucket& bucket : *z.buckets) {
    sums += 4 * static_cast<double>(bucket.numel());
    updated += static_cast<double>(bucket.updated_numel());
    whole += static_cast<double>(bucket.numel()) * z.element;
  }
  const zero::StateBytes state = zero::state_bytes(
      options.dtype, options.optimizer, options.optimizer_options);
  const double masters = dtype_bytes(options.dtype) == 2 ? 4 : 0;
  bill[MemoryKind::kOptimizerState] =
      updated * (z.updates > 0 ? state.optimizer : masters);
  if (z.how->accumulate_f32 && options.steps > 0) {
    // Beside the sums, gradients pass: how many at once is left to a run on
    // shapes
    bill[MemoryKind::kGradient] = kNotPredicted;
    bill[MemoryKind::kActivation] = kNotPredicted;
  } else if (z.how->accumulate_f32) {
    bill[MemoryKind::kGradient] = sums;
  }
  if (z.how->zero_stage != 1) return bill;
  const double parameters = whole;
  // A bucket's gradients leave, and its shard arrives
  for (const UpdateBucket& bucket : *z.buckets) {
    flats += static_cast<double>(bucket.flat.bytes());
    whole -= static_cast<double>(bucket.numel()) * z.element;
    shards += static_cast<double>(bucket.own.bytes());
    most = std::max(most, whole + shards);
  }
  // Running statistics stay beside them
  bill[MemoryKind::kParameter] += flats - parameters;
  if (options.steps > 0 && !z.how->accumulate_f32) {
    bill[MemoryKind::kGradient] = std::max(bill[MemoryKind::kGradient], most);
  }
  return bill;
}

MemoryBill zero_memory(const BillSizes& z, const zero::ZeroOptimizer& zero) {
  MemoryBill bill = zero::zero_bill(
      zero, *z.options, z.layers->padded, static_cast<std::int64_t>(z.rows),
      z.how->micro_batches, z.how->recompute == "blocks", /*sent_beside=*/0);
  const bool trains = z.options->steps > 0;
  const auto* flat = dynamic_cast<const zero::ZeroStage12*>(&zero);
  const bool is_large = flat != nullptr && flat->has_large_gradients();
  if (trains && z.t() > 1 && !is_large) {
    // Gradients that pass: the table's part, and beside it the largest of c_fc,
    // the table again, and the positions. c_proj's bias passes before its weight
    const double table = z.vocabulary() * z.h() / z.t();
    const double fc = 4 * z.h() * (z.h() + 1) / z.t();
    const double positions =
        static_cast<double>(z.layers->padded.n_positions) * z.h();
    bill[MemoryKind::kGradient] =
        z.element * (static_cast<double>(zero.shard_numel()) + table +
                     std::max({fc, table, positions}));
  }
  if (is_left_to_shapes(z)) {
    leave_to_shapes(bill, z);
  } else if (z.t() > 1) {
    std::vector<MicroBatch> piece(1);
    piece[0].rows = static_cast<std::int64_t>(z.rows);
    bill[MemoryKind::kActivation] = single_device_bill(
        *z.options, z.layers->padded, piece, z.how->recompute == "blocks",
        z.how->tp)[MemoryKind::kActivation];
  }
  return bill;
}

MemoryBill expert_zero_memory(const BillSizes& z,
                              const zero::ZeroOptimizer& dense,
                              const zero::ZeroOptimizer& experts) {
  // The formulas of the experts' chapter, whose replicas are dp x cp here
  moe::BillSizes sizes;
  sizes.dp = z.how->dp * z.how->cp;
  sizes.ep = z.how->ep, sizes.t = z.how->tp;
  sizes.zero_stage = 2;
  sizes.micro_batches = z.how->micro_batches;
  sizes.loss_bytes = 0;
  moe::add_zero_sizes(sizes, dense);
  moe::add_zero_sizes(sizes, experts);
  MemoryBill bill = moe::predicted_bill(*z.options, model_config(*z.options),
                                        z.how->moe(), sizes, {})
                        .memory;
  if (is_left_to_shapes(z) || z.how->recompute == "blocks") {
    leave_to_shapes(bill, z);
  }
  return bill;
}

}  // namespace shardbook::hybrid
