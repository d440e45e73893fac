#include "chapters/14_hybrid_3d/bill.h"

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/13_moe/bill.h"
#include "chapters/common/pipeline/pipeline_bill.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/run/kept.h"

namespace shardbook::hybrid {
namespace {

/// Bytes that a rank of n sends for an all-reduce; half of it for an all-gather
/// or a reduce-scatter.
double all_reduce(double n, double bytes) { return 2 * (n - 1) / n * bytes; }

/// Elements of a bucket's first sum, with padding.
double elements_of(const UpdateBucket& bucket) {
  return static_cast<double>(bucket.flat.defined() ? bucket.flat.numel()
                                                   : bucket.numel());
}

}  // namespace

BillSizes bill_sizes(const Options& options, const HybridOptions& setup,
                     const RankLayers& layers,
                     const pipeline::Schedule& schedule,
                     const std::vector<int>& cuts, int pp_rank) {
  BillSizes sizes;
  sizes.options = &options;
  sizes.setup = &setup;
  sizes.layers = &layers;
  sizes.rows =
      static_cast<double>(options.batch / (setup.dp * setup.micro_batches));
  sizes.element = static_cast<double>(dtype_bytes(options.dtype));
  sizes.sum = options.dtype == DType::kF64 ? 8 : 4;
  sizes.cuts = cuts;
  const int last = layers.list->size() - 1;
  const pipeline::Recomputed recomputed(schedule, pp_rank,
                                        setup.recomputed_stages());
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
        if (layer == 0 || layer == last || !setup.has_own_experts ||
            !layers.padded.llama.has_experts_in(layer - 1)) {
          continue;
        }
        sizes.expert_blocks += 1;
        if (again) sizes.expert_blocks_again += 1;
      }
    }
  }
  if (setup.recompute == "blocks") {
    sizes.blocks_again = sizes.blocks;
    sizes.expert_blocks_again = sizes.expert_blocks;
  }
  if (setup.recompute == "attention") sizes.attentions_again = sizes.blocks;
  return sizes;
}

double BillSizes::key_share() const {
  // A rank of tp has its own heads
  ModelConfig own = layers->padded;
  own.n_head /= setup->tp;
  own.llama.kv_heads /= setup->tp;
  return sequence_parallel::key_share(setup->sequence(), own, setup->cp);
}

// --- Bytes -------------------------------------------------------------------

namespace {

/// Layers of experts send slots over ep, and gather them over tp.
double expert_bytes(const BillSizes& z) {
  const moe::MoeOptions moe = z.setup->moe();
  const moe::BillSizes groups = {.ep = z.setup->ep, .t = z.setup->tp};
  const auto slots = static_cast<double>(moe::capacity(
      static_cast<std::int64_t>(z.tokens()), moe.gate, /*is_training=*/true));
  // Forward sends half of the messages
  return z.element * (z.blocks + z.blocks_again / 2) *
         moe::layer_elements(moe, z.setup->experts, slots, z.h(), groups);
}

}  // namespace

double layer_bytes(const BillSizes& z) {
  const bool has_experts = z.setup->has_experts();
  double bytes = has_experts ? expert_bytes(z) : 0;
  const double passes = z.heads + z.heads_again;  // of the loss
  if (z.t() > 1) {
    const double x = z.tokens() * z.h() * z.element;
    if (z.setup->sequence_parallel) {
      // Gathers and scatters, half an all-reduce each: four forward and six
      // backward per block; one of each for embedding and head. Experts have
      // one of each in the place of an MLP's two and three, a Mixtral's none
      const double halves =
          (has_experts ? 7 : 10) * z.blocks - 5 * z.expert_blocks +
          (has_experts ? 3 : 4) * z.blocks_again - 2 * z.expert_blocks_again +
          2 * (z.embeddings + z.heads) + z.embeddings_again + z.heads_again;
      bytes += all_reduce(z.t(), halves / 2 * x);
    } else {
      // f and g of attention and MLP; g after the embedding, f before the head
      const double sums =
          (has_experts ? 1 : 2) * (2 * z.blocks + z.blocks_again) +
          z.embeddings + z.embeddings_again + z.heads;
      bytes += all_reduce(z.t(), sums * x);
    }
    // Largest logit, logit of the target, sum of exponentials
    bytes += all_reduce(z.t(), 3 * z.tokens() * z.sum * passes);
  }
  if (z.c() > 1) {
    const double whole = z.tokens() * z.c() * z.queries() / z.t();
    const sequence_parallel::LayerElements layer =
        sequence_parallel::layer_elements(z.setup->sequence(), z.c(), whole,
                                          z.key_share());
    bytes +=
        (z.blocks + z.blocks_again + z.attentions_again) * layer.forward *
            z.element +
        z.blocks * (layer.backward * z.element + layer.backward_sums * z.sum);
    bytes += all_reduce(z.c(), 2 * z.sum * passes);  // loss, and its tokens
  }
  return bytes;
}

namespace {

/// Gradients, and (ZeRO-1) parameters: over dp x cp, tp and tied stages.
double update_bytes(const BillSizes& z) {
  double bytes = 0;
  for (const UpdateBucket& bucket : *z.buckets) {
    const auto kept = static_cast<double>(bucket.updated_numel());
    const double grad = bucket.gradient_bytes;
    // All-reduce, or reduce-scatter of gradients and all-gather of parameters
    const double second = bucket.flat.defined() ? z.element : grad;
    bytes += all_reduce(bucket.data->size(),
                        elements_of(bucket) * (grad + second) / 2);
    if (bucket.is_partial) bytes += all_reduce(z.t(), kept * grad);
    if (bucket.tied != nullptr) {
      bytes += all_reduce(bucket.tied->size(), kept * grad);
    }
  }
  return bytes;
}

}  // namespace

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

namespace {

bool keeps_known_bytes(const BillSizes& z) {
  if (z.setup->has_own_experts) return false;
  return !z.setup->has_experts() || moe::keeps_known_bytes(z.setup->moe());
}

/// Bytes that deferred weight gradients of one layer need.
double layer_deferred(const BillSizes& z, int layer, std::int64_t rows) {
  const KeptSizes sizes = z.kept_sizes_of(rows);
  const int last = z.layers->list->size() - 1;
  const double token = sizes.rows * sizes.tokens * z.element;
  const double x = token * z.h();
  const BlockTable block = z.block();
  const bool is_cut = z.setup->sequence_parallel;
  if (layer == 0 || layer == last) {
    return deferred_by_layer(z.layers->padded, layer, sizes);
  }
  // A recomputed block keeps its input
  const double input =
      z.setup->recompute == "blocks" ? x / (is_cut ? z.t() : 1) : 0;
  if (!is_cut && !z.setup->has_experts()) {
    return deferred_by_layer(z.layers->padded, layer, sizes) + input;
  }
  if (z.setup->has_experts()) {
    // Attention's: the product behind it, and the one before it where that does
    // not gather
    const double before = is_cut ? 0 : block.qkv.deferred(z.t());
    return input + token * (before + block.proj.deferred(z.t())) +
           moe::deferred_by_experts(z.layers->padded, z.setup->moe(),
                                    z.setup->experts, sizes);
  }
  // Inputs of the products that are cut by rows, and gradients that were gathered.
  // A layer that gathers its input computes its weight's gradient at once
  return input +
         token * (block.proj.deferred(z.t()) + block.down.deferred(z.t()));
}

/// Activations that one layer keeps of `rows` samples; the first of a stage also
/// what it has received.
double layer_kept(const BillSizes& z, int layer, std::int64_t rows,
                  bool begins_stage = false) {
  const HybridOptions& setup = *z.setup;
  const ModelConfig& config = z.layers->padded;
  KeptSizes sizes = z.kept_sizes_of(rows);
  const int last = z.layers->list->size() - 1;
  const bool is_cut = setup.sequence_parallel && z.t() > 1;
  if (layer == 0 || config.is_image()) {
    // The last block's output, which a head alone does not compute again
    if (layer == last && begins_stage) sizes.recompute = false;
    return kept_by_layer(config, layer, sizes);
  }
  const double tokens = sizes.rows * sizes.tokens;
  const double x = tokens * z.h() * z.element;
  const BlockTable block = z.block();
  if (layer == last) {
    // Norms of own tokens only; the input of the head is gathered
    const double norm = x + block.norm_1.statistics() * tokens * z.sum;
    return kept_by_head(config, sizes) - (is_cut ? norm * (1 - 1 / z.t()) : 0);
  }
  if (setup.recompute == "blocks") return is_cut ? x / z.t() : x;
  const bool is_rsa = z.c() > 1 && setup.cp_kind == "rsa";
  const double heads = static_cast<double>(config.n_head) / z.t();
  // Recomputed attention keeps its inputs only
  const bool again = setup.recompute == "attention";
  if (is_cut) sizes.t = 1;
  double kept = kept_by_block(config, sizes) / (is_cut ? z.t() : 1);
  if (again || is_rsa) {
    kept -= tokens * block.attention.statistics(z.t()) * z.sum;
  }
  if (setup.has_experts()) {
    const double mlp = 8 * x / z.t();
    kept += moe::kept_by_experts(config, setup.moe(), setup.experts,
                                 z.kept_sizes_of(rows)) -
            mlp;
    // The gate reads all tokens of ln_2's output
    if (is_cut) kept += x * (1 - 1 / z.t());
  }
  if (again || z.c() == 1) return kept;
  // Rows of scores; the output by heads, as well as by tokens
  if (is_rsa) {
    kept += tokens * heads * static_cast<double>(z.options->seq) * z.element *
            (z.options->dropout > 0 ? 2 : 1);
  } else if (setup.cp_kind == "ulysses") {
    // Keys and values repeated
    const double keys =
        static_cast<double>(config.is_llama() ? config.llama.kv_heads
                                              : config.n_head) /
        static_cast<double>(config.n_head);
    kept += tokens * z.element * z.queries() / z.t() *
            (1 + 2 * (z.key_share() - keys));
  }
  return kept;
}

}  // namespace

MemoryBill memory(const BillSizes& z, PipelineModel& model,
                  pipeline::Engine& engine) {
  const Options& options = *z.options;
  MemoryBill bill = pipeline::states_bill(options, model);
  double updated = 0, flats = 0, whole = 0, shards = 0, sums = 0;
  for (const UpdateBucket& bucket : *z.buckets) {
    sums += 4 * static_cast<double>(bucket.numel());
    updated += static_cast<double>(bucket.updated_numel());
    whole += static_cast<double>(bucket.numel()) * z.element;
    if (!bucket.flat.defined()) continue;
    flats += static_cast<double>(bucket.flat.bytes());
    shards += static_cast<double>(bucket.own.bytes());
    sums += 4 * static_cast<double>(bucket.own.numel());  // the update's shard
  }
  const zero::StateBytes state = zero::state_bytes(
      options.dtype, options.optimizer, options.optimizer_options);
  const double masters = dtype_bytes(options.dtype) == 2 ? 4 : 0;
  bill[MemoryKind::kOptimizerState] =
      updated * (z.updates > 0 ? state.optimizer : masters);
  if (z.setup->zero_stage == 1) {
    // Running statistics are not in the flat parameters
    bill[MemoryKind::kParameter] += flats - whole;
    bill[MemoryKind::kGradient] = shards;
  }
  if (z.setup->accumulate_f32) bill[MemoryKind::kGradient] = sums;
  if (z.updates == 0) bill[MemoryKind::kGradient] = 0;
  if (options.steps == 0) return bill;
  // Activations that wait between I and W have a formula for GPTs only
  const bool splits = engine.schedule().splits_backward();
  const bool is_known =
      !splits || !(z.layers->padded.is_image() ||
                   (z.setup->has_experts() && z.setup->recompute == "blocks"));
  if (!is_known || !keeps_known_bytes(z)) {
    bill[MemoryKind::kActivation] =
        z.setup->has_own_experts ? kNoClaim : kNotPredicted;
    return bill;
  }
  const auto& layout = model.layout();
  const int last_begin = layout.begin(layout.num_stages() - 1);
  bill[MemoryKind::kActivation] = engine.predicted_kept(
      [&](int layer, std::int64_t rows) {
        return layer_kept(z, layer, rows, layer == last_begin);
      },
      [&](int layer, std::int64_t rows) {
        return layer_deferred(z, layer, rows);
      });
  return bill;
}

namespace {

/// Activations that one forward of the whole model keeps, with the loss.
double model_kept(const BillSizes& z) {
  if (z.options->steps == 0) return 0;
  if (!keeps_known_bytes(z)) return kNotPredicted;
  double kept = z.sum;
  for (int layer = 0; layer < z.layers->list->size(); ++layer) {
    kept += layer_kept(z, layer, static_cast<std::int64_t>(z.rows));
  }
  return kept;
}

}  // namespace

MemoryBill zero_memory(const BillSizes& z, const zero::ZeroOptimizer& zero) {
  MemoryBill bill = zero::zero_bill(zero, *z.options, z.layers->padded,
                                    static_cast<std::int64_t>(z.rows));
  bill[MemoryKind::kActivation] = model_kept(z);
  return bill;
}

MemoryBill expert_zero_memory(const BillSizes& z) {
  // The formulas of the experts' chapter, whose replicas are dp x cp here
  const moe::BillSizes sizes = {.dp = z.setup->dp * z.setup->cp,
                                .ep = z.setup->ep,
                                .t = z.setup->tp,
                                .zero_stage = 2,
                                .micro_batches = z.setup->micro_batches};
  MemoryBill bill = moe::predicted_bill(*z.options, model_config(*z.options),
                                        z.setup->moe(), sizes, {})
                        .memory;
  bill[MemoryKind::kActivation] = model_kept(z);
  return bill;
}

}  // namespace shardbook::hybrid
