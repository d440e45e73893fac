#include "chapters/13_moe/bill.h"

#include <algorithm>

#include "chapters/03_zero_fsdp/shard_layout.h"
#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/run/textbook.h"
#include "chapters/common/sharded/loss.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook::moe {
namespace {

/// Ranks that hold the same expert parameters.
int replicas(const MoeOptions& moe, const BillSizes& sizes) {
  return sizes.edp() * (moe.expert_tensor_parallel ? 1 : sizes.t);
}

/// Elements of a list of parameters under ZeRO: padded to 2 per rank.
double padded(double numel, int ranks) {
  const auto n = static_cast<std::int64_t>(numel);
  return static_cast<double>(
      zero::flat_layout({{n}}, ranks, zero::ZeroOptions().alignment)
          .full_numel());
}

/// A rank's piece of a micro-batch.
KeptSizes sizes_here(const Options& options, const BillSizes& sizes) {
  KeptSizes here =
      kept_sizes(options, options.batch / (sizes.dp * sizes.micro_batches));
  here.t = sizes.t;
  return here;
}

double vocabulary_rows(const ModelConfig& config, const BillSizes& sizes) {
  return static_cast<double>(padded_vocabulary(config.vocab_size, sizes.t)) /
         sizes.t;
}

double all_reduce(double ranks) { return 2 * (ranks - 1) / ranks; }
double all_gather(double ranks) { return (ranks - 1) / ranks; }

Parameters parameters_here(const ModelConfig& config, const MoeOptions& moe,
                           const BillSizes& sizes) {
  const auto h = static_cast<double>(config.n_embd);
  const double t = sizes.t, expert_t = moe.expert_tensor_parallel ? t : 1;
  const DecoderNames names = decoder_names(config);
  Parameters here;
  here.dense =
      vocabulary_rows(config, sizes) * h * (names.head.empty() ? 1 : 2) +
      block_table(config).norm_1.parameters();
  if (!names.positions.empty()) {
    here.dense += static_cast<double>(config.n_positions) * h;
  }
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const BlockTable block = block_table(config, i);
    double mlp = 0;
    for (const BlockPart& part : block.parts()) {
      if (part.experts > 1) {  // a Mixtral's
        here.experts += part.parameters() / sizes.ep;
      } else {
        const bool is_mlp =
            part.name == block.up.name || part.name == block.down.name;
        (is_mlp ? mlp : here.dense) += part.parameters(t);
      }
    }
    const auto experts = static_cast<double>(experts_of_layer(moe, i));
    if (config.is_llama() || experts == 1) {
      here.dense += mlp;
      continue;
    }
    here.dense += h * experts * (moe.gate.noise == Noise::kNoisyTopK ? 2 : 1);
    if (has_mlp_beside(moe)) here.dense += mlp;
    if (moe.use_residual) here.dense += 2 * h + 2;
    if (moe.shared_expert && moe.gate_shared_expert) here.dense += h;
    here.experts +=
        experts / sizes.ep *
        (block.up.parameters(expert_t) + block.down.parameters(expert_t));
  }
  return here;
}

/// Routing-dependent bytes of all steps, from the layers' records.
double routed_bytes(const KeptSizes& z, double h, const MoeOptions& moe,
                    const BillSizes& sizes, const MoeRecord& record) {
  if (moe.is_dropless) return dropless_bytes(record, h, z.element, sizes.ep);
  double bytes = 0;
  for (const auto& [name, load] : record.loads) {
    const auto experts = static_cast<std::int64_t>(load.exp_counts.size());
    const auto forwards = static_cast<double>(load.forwards);
    bytes +=
        z.element *
        layer_elements(moe, experts, static_cast<double>(load.slots), h, sizes);
    bytes += forwards * all_reduce(sizes.ep) * 8;
  }
  return bytes;
}

/// Bytes of the layers in one micro-batch.
double layer_bytes(const Options& options, const ModelConfig& config,
                   const MoeOptions& moe, const BillSizes& sizes) {
  const KeptSizes z = sizes_here(options, sizes);
  const double tokens = z.rows * z.tokens;
  const auto h = static_cast<double>(config.n_embd);
  double elements = 0;
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const std::int64_t experts = experts_of_layer(moe, i);
    const bool is_moe = experts > 1;
    if (is_moe && !moe.depends_on_routing()) {
      elements += layer_elements(
          moe, experts, slots_of_expert(moe, experts, tokens), h, sizes);
    }
    // f and g of attention, and of an MLP that TP cuts
    const double cuts = !is_moe || has_mlp_beside(moe) ? 4 : 2;
    elements += cuts * all_reduce(sizes.t) * tokens * h;
  }
  // g after the embedding, f before the head; three numbers per token in the
  // loss
  elements += 2 * all_reduce(sizes.t) * tokens * h;
  return elements * z.element + 3 * all_reduce(sizes.t) * tokens * z.stat;
}

/// Bytes of gradients and parameters: before the first step, of one, and of the
/// parameters that an update of ZeRO sends.
struct Reduced {
  double once = 0, step = 0, update = 0;
};
Reduced reduced_bytes(const MoeOptions& moe, const BillSizes& sizes,
                      const Parameters& here, double e) {
  const int r = replicas(moe, sizes);
  if (sizes.zero_stage == 0) {
    return {0, e * (all_reduce(sizes.dp) * here.dense +
                    all_reduce(r) * here.experts)};
  }
  const double flat = e * (all_gather(sizes.dp) * padded(here.dense, sizes.dp) +
                           all_gather(r) * padded(here.experts, r));
  const double passes =
      sizes.zero_stage == 1 ? 1 : static_cast<double>(sizes.micro_batches);
  return {flat, passes * flat, flat};
}

/// Seconds of a step on the cluster `textbook`, in the terms of the page.
struct StepTime {
  const MoeOptions& moe;
  const BillSizes& sizes;
  const Parameters& here;
  KeptSizes z;                                ///< of one micro-batch
  textbook::GptTimes model;                   ///< of one micro-batch
  double layers = 0, experts = 0, slots = 0;  ///< of one expert
  int replicas = 1;

  double h() const { return model.h; }
  double c_attn() const { return model.product(6 * h() * h()); }
  double c_proj() const { return model.product(2 * h() * h()); }
  /// The number of slots, and their size in bytes.
  double all_slots() const { return experts * slots; }
  double slot_bytes() const { return z.element * all_slots() * h(); }

  double a() const {
    return textbook::all_reduce(sizes.t, z.element * model.tokens * h());
  }
  double gate() const {
    return 2 * model.tokens * h() * experts / textbook::kRate;
  }
  /// One of the experts' two products.
  double expert() const {
    return 8 * all_slots() * h() * h() / sizes.t / textbook::kRate;
  }
  double exchange() const {
    return textbook::all_gather(sizes.ep, slot_bytes() / sizes.t);
  }
  double gather() const { return textbook::all_gather(sizes.t, slot_bytes()); }
  /// Where TP cuts experts: slots gathered before them, sums of their units.
  double cut_gather() const {
    return moe.expert_tensor_parallel ? gather() : 0;
  }
  double cut_sum() const {
    return moe.expert_tensor_parallel
               ? textbook::all_reduce(sizes.t, slot_bytes())
               : 0;
  }

  double forward() const {
    return c_attn() + model.attention() + c_proj() + a() + gate() +
           2 * exchange() + 2 * expert() + gather() + cut_gather() + cut_sum();
  }
  /// A block's backward after the gradients of its experts.
  double rest() const {
    return cut_sum() + exchange() + gather() + 2 * gate() + 2 * c_proj() +
           2.5 * model.attention() + c_attn() + std::max(c_attn(), a());
  }
  double backward() const {
    return cut_gather() + exchange() + 4 * expert() + rest();
  }

  /// The backward, from the loss on.
  double whole_backward() const {
    return 2 * model.head() + a() + layers * backward();
  }
  /// Time of the sum of the losses that the work `hidden` does not cover.
  double loss_left(double hidden) const {
    return std::max(0.0, textbook::all_reduce(sizes.dp, 8) - hidden);
  }
  /// ZeRO's time after backward and `loss`. Experts' gradients are reduced
  /// during the rest of backward, dense ones after it; offload copies both.
  double reduced(double dense, double experts, double loss) const {
    const double left = experts - rest();
    if (sizes.ep == 1 && sizes.t == 1) {  // one group for all
      return std::max(0.0, left + loss) + dense + copy_dense() + copy_experts();
    }
    return std::max(left, loss + dense + copy_dense()) + copy_experts();
  }
  /// A shard to or from the host.
  double copied(double numel, int ranks) const {
    if (!sizes.offload) return 0;
    return textbook::message(z.element * padded(numel, ranks) / ranks);
  }
  double copy_dense() const { return copied(here.dense, sizes.dp); }
  double copy_experts() const { return copied(here.experts, replicas); }

  /// All-reduces; with ZeRO, gradients scattered and parameters gathered.
  double sums() const {
    // One EP group of all ranks: exchanges wait for the sum of the losses
    const bool waits = sizes.ep == sizes.dp && sizes.t == 1;
    const double behind_exchanges = waits ? loss_left(2 * model.head()) : 0;
    const double beside = waits ? 0 : loss_left(whole_backward());
    if (sizes.zero_stage == 0) {
      return textbook::all_reduce(sizes.dp, z.element * here.dense) +
             textbook::all_reduce(replicas, z.element * here.experts) +
             behind_exchanges + beside;
    }
    const double dense = textbook::all_gather(
        sizes.dp, z.element * padded(here.dense, sizes.dp));
    const double experts = textbook::all_gather(
        replicas, z.element * padded(here.experts, replicas));
    const double earlier = sizes.zero_stage == 2
                               ? static_cast<double>(sizes.micro_batches - 1)
                               : 0;
    const bool is_one_group = sizes.ep == 1 && sizes.t == 1;
    const double loss =
        is_one_group ? loss_left(whole_backward() - rest()) : beside;
    return earlier * reduced(dense, experts, 0) + behind_exchanges +
           reduced(dense, experts, loss) + copy_dense() + dense +
           copy_experts() + experts;
  }
  double step() const {
    const double ends =
        2 * a() + 3 * model.head() +
        3 * textbook::all_reduce(sizes.t, z.stat * model.tokens);
    return static_cast<double>(sizes.micro_batches) *
               (ends + layers * (forward() + backward())) +
           sums() + textbook::all_reduce(sizes.dp * sizes.t, 8);
  }
};

/// Needs equal experts with slots in every layer. ZeRO's one message per list
/// must not meet TP's in one group.
bool has_step_time(const Options& options, const ModelConfig& config,
                   const MoeOptions& moe, const BillSizes& sizes,
                   const Parameters& here) {
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    if (experts_of_layer(moe, i) != moe.gate.num_experts) return false;
  }
  const double bucket =
      static_cast<double>(zero::ZeroOptions().reduce_bucket_size);
  const bool sends_once =
      sizes.zero_stage == 0 || (std::max(here.dense, here.experts) <= bucket &&
                                (sizes.dp > 1 || sizes.t == 1));
  return textbook::is_chosen(options) && sends_once &&
         !moe.depends_on_routing() && !moe.is_naive && !has_mlp_beside(moe) &&
         moe.gate.noise != Noise::kNoisyTopK;
}

double step_s(const Options& options, const ModelConfig& config,
              const MoeOptions& moe, const BillSizes& sizes,
              const Parameters& here) {
  if (!has_step_time(options, config, moe, sizes, here)) return kNotPredicted;
  const KeptSizes z = sizes_here(options, sizes);
  StepTime time{moe, sizes, here, z,
                textbook::gpt_times(options, config, z.rows)};
  time.model.t = sizes.t;
  time.model.vocabulary = vocabulary_rows(config, sizes) * sizes.t;
  time.layers = static_cast<double>(config.n_layer);
  time.experts = static_cast<double>(moe.gate.num_experts);
  time.slots = slots_of_expert(moe, moe.gate.num_experts, z.rows * z.tokens);
  time.replicas = replicas(moe, sizes);
  return time.step();
}

}  // namespace

double layer_elements(const MoeOptions& moe, std::int64_t experts, double slots,
                      double width, const BillSizes& sizes) {
  const double all = static_cast<double>(experts) * slots * width;
  // Replicated experts: slots are gathered after them, and their gradients
  // before; cut experts gather twice as often, and sum f and g
  const double gathers =
      (moe.expert_tensor_parallel ? 4 : 2) * all_gather(sizes.t) +
      (moe.expert_tensor_parallel ? 2 : 0) * all_reduce(sizes.t);
  return 4 * all_gather(sizes.ep) * all / sizes.t + gathers * all;
}

Parameters held_parameters(const MoeOptions& moe, const BillSizes& sizes,
                           const Parameters& here) {
  if (sizes.zero_stage == 0) return here;
  return {padded(here.dense, sizes.dp),
          here.experts > 0 ? padded(here.experts, replicas(moe, sizes)) : 0};
}

MemoryBill states_bill(const Options& options, const MoeOptions& moe,
                       const BillSizes& sizes, const Parameters& here) {
  const int stage = sizes.zero_stage;
  // The first update creates the optimizer's state, or a checkpoint does
  const bool updates = options.steps > sizes.skipped;
  const bool has_state =
      updates || (options.steps > 0 && options.first_step > 0);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const auto [dense, experts] = held_parameters(moe, sizes, here);
  MemoryBill bill;
  bill[MemoryKind::kParameter] = (dense + experts) * element;

  // Gradients: all, or a shard
  const double shard =
      dense / sizes.dp + (experts > 0 ? experts / replicas(moe, sizes) : 0);
  const double gradients = stage < 2       ? dense + experts
                           : sizes.offload ? 0
                                           : shard;
  bill[MemoryKind::kGradient] = updates ? gradients * element : 0;
  // ZeRO keeps f32 copies of 16-bit weights, from the beginning
  const double states = stage == 0 ? dense + experts : shard;
  const double masters = element == 2 ? 4 : 0;
  const double moments = zero::state_bytes(options.dtype, options.optimizer,
                                           options.optimizer_options)
                             .optimizer -
                         masters;
  bill[MemoryKind::kOptimizerState] =
      sizes.offload ? 0
                    : states * ((has_state ? moments : 0) +
                                (stage > 0 || sizes.has_masters ? masters : 0));
  return bill;
}

double dropless_bytes(const MoeRecord& record, double width, double element,
                      int ep) {
  double bytes = 0;
  for (const auto& [name, load] : record.loads) {
    // A backward sends as many rows as its forward
    const auto rows =
        static_cast<double>(2 * load.sent_rows + load.sent_rows_again);
    const auto counts =
        static_cast<double>((load.forwards + load.forwards_again) *
                            static_cast<std::int64_t>(load.exp_counts.size()));
    bytes += rows * width * element + all_gather(ep) * 8 * counts;
  }
  return bytes;
}

Bill predicted_bill(const Options& options, const ModelConfig& config,
                    const MoeOptions& moe, const BillSizes& sizes,
                    const MoeRecord& record) {
  const KeptSizes z = sizes_here(options, sizes);
  const auto steps = static_cast<double>(options.steps);
  const auto updates = static_cast<double>(options.steps - sizes.skipped);
  const auto micro = static_cast<double>(sizes.micro_batches);
  const Parameters here = parameters_here(config, moe, sizes);
  const Reduced reduced = reduced_bytes(moe, sizes, here, z.element);
  const double scalars =
      8 * (all_reduce(sizes.dp) + all_reduce(sizes.dp * sizes.t));
  Bill bill;
  bill.bytes =
      reduced.once + updates * reduced.update +
      steps * (micro * layer_bytes(options, config, moe, sizes) + reduced.step +
               scalars + balancing_bytes(config, sizes.dp));
  if (moe.depends_on_routing()) {
    // On shapes, a few micro-batches represent all
    bill.bytes =
        options.backend == "sim"
            ? kNotPredicted
            : bill.bytes + routed_bytes(z, static_cast<double>(config.n_embd),
                                        moe, sizes, record);
  }
  bill.memory = states_bill(options, moe, sizes, here);
  bill.memory[MemoryKind::kActivation] =
      moe.depends_on_routing() ? kNoClaim
      : options.steps > 0      ? predicted_activations(config, moe, z)
                               : 0;
  bill.step_s = step_s(options, config, moe, sizes, here);
  return bill;
}

}  // namespace shardbook::moe
