#include "chapters/13_moe/bill.h"

#include <algorithm>
#include <cmath>

#include "chapters/03_zero_fsdp/flat_buffer.h"
#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/13_moe/activations.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook::moe {
namespace {

bool depends_on_routing(const MoeOptions& moe) {
  return moe.is_dropless || !moe.gate.drop_tokens;
}

/// Ranks that hold the same expert parameters.
int replicas(const MoeOptions& moe, const BillSizes& sizes) {
  return sizes.edp() * (moe.expert_tensor_parallel ? 1 : sizes.t);
}

/// Elements of a list of parameters under ZeRO: padded to 2 per rank.
double padded(double numel, int ranks) {
  const auto n = static_cast<std::int64_t>(numel);
  return static_cast<double>(
      zero::flat_layout({n}, ranks, zero::ZeroOptions().alignment).padded);
}

double vocabulary_rows(const ModelConfig& config, const BillSizes& sizes) {
  return static_cast<double>(padded_vocabulary(config.vocab_size, sizes.t)) /
         sizes.t;
}

double all_reduce(double ranks) { return 2 * (ranks - 1) / ranks; }
double all_gather(double ranks) { return (ranks - 1) / ranks; }

struct Work {
  double rows, tokens, h, e, stat;  // of a micro-batch; bytes of an element
};
Work work_of(const Options& options, const ModelConfig& config,
             const BillSizes& sizes) {
  Work work;
  work.rows = static_cast<double>(options.batch) /
              static_cast<double>(sizes.dp * sizes.micro_batches);
  work.tokens = work.rows * static_cast<double>(options.seq);
  work.h = static_cast<double>(config.n_embd);
  work.e = static_cast<double>(dtype_bytes(options.dtype));
  work.stat = options.dtype == DType::kF64 ? 8 : 4;
  return work;
}

double slots_of(const Work& work, const MoeOptions& moe, std::int64_t experts) {
  GateOptions gate = moe.gate;
  gate.num_experts = experts;
  return static_cast<double>(
      capacity(static_cast<std::int64_t>(work.tokens), gate, true));
}

/// Bytes of all steps that depend on the routing: what the layers have seen.
double routed_bytes(const Work& work, const MoeOptions& moe,
                    const BillSizes& sizes, const MoeRecord& record) {
  double bytes = 0;
  for (const auto& [name, load] : record.loads) {
    const auto experts = static_cast<std::int64_t>(load.exp_counts.size());
    const auto forwards = static_cast<double>(load.forwards);
    if (moe.is_dropless) {
      // Rows there and back, and their gradients; the counts
      bytes += 2 * static_cast<double>(load.sent_rows) * work.h * work.e;
      bytes +=
          forwards * all_gather(sizes.ep) * 8 * static_cast<double>(experts);
      continue;
    }
    bytes +=
        work.e * layer_elements(moe, experts, static_cast<double>(load.slots),
                                work.h, sizes);
    bytes += forwards * all_reduce(sizes.ep) * 8;
  }
  return bytes;
}

/// Bytes of the layers in one micro-batch.
double layer_bytes(const Options& options, const ModelConfig& config,
                   const MoeOptions& moe, const BillSizes& sizes) {
  const Work work = work_of(options, config, sizes);
  double elements = 0;
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const std::int64_t experts = experts_of_layer(moe, i);
    const bool is_moe = experts > 1;
    if (is_moe && !depends_on_routing(moe)) {
      elements += layer_elements(moe, experts, slots_of(work, moe, experts),
                                 work.h, sizes);
    }
    // f and g of attention, and of an MLP that TP cuts
    const double cuts = !is_moe || has_mlp_beside(moe) ? 4 : 2;
    elements += cuts * all_reduce(sizes.t) * work.tokens * work.h;
  }
  // g behind the embedding, f before the head; three numbers per token in the
  // loss
  elements += 2 * all_reduce(sizes.t) * work.tokens * work.h;
  return elements * work.e + 3 * all_reduce(sizes.t) * work.tokens * work.stat;
}

/// Bytes of gradients and parameters: of one step, and before the first.
struct Reduced {
  double once = 0, step = 0;
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
  return {flat, (passes + 1) * flat};
}

/// The most gradients that pass through stage 2 at one time, in elements.
double passing_gradients(const ModelConfig& config, const MoeOptions& moe,
                         const BillSizes& sizes) {
  const auto h = static_cast<double>(config.n_embd);
  const double table = vocabulary_rows(config, sizes) * h;
  double widest = std::max({(3 * h * h + 3 * h) / sizes.t, table,
                            static_cast<double>(config.n_positions) * h});
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const std::int64_t experts = experts_of_layer(moe, i);
    if (experts == 1 || has_mlp_beside(moe)) {
      widest = std::max(widest, (4 * h * h + 4 * h) / sizes.t);
    }
    if (experts == 1) continue;
    const double cut = moe.expert_tensor_parallel ? sizes.t : 1;
    widest = std::max(
        widest, static_cast<double>(experts / sizes.ep) * 4 * h * h / cut);
  }
  return table + widest;
}

MemoryBill memory_bill(const Options& options, const ModelConfig& config,
                       const MoeOptions& moe, const BillSizes& sizes,
                       const Parameters& here, const MoeRecord& record) {
  const Work work = work_of(options, config, sizes);
  const int r = replicas(moe, sizes), stage = sizes.zero_stage;
  const bool trains = options.steps > 0;
  const double dense = stage == 0 ? here.dense : padded(here.dense, sizes.dp);
  const double experts = stage == 0
                             ? here.experts
                             : (here.experts > 0 ? padded(here.experts, r) : 0);
  const zero::StateBytes bytes = zero::state_bytes(
      options.dtype, options.optimizer, options.optimizer_options);
  MemoryBill bill;
  bill[MemoryKind::kParameter] = (dense + experts) * work.e;
  bill[MemoryKind::kInput] =
      trains ? work.rows * static_cast<double>(options.seq) * 2 * 8 : 0;
  bill[MemoryKind::kActivation] =
      depends_on_routing(moe) ? kNoClaim
      : trains ? predicted_activations(options, config, moe, sizes)
               : 0;

  // Gradients: all, with the head's part of the tied table beside the
  // embedding's; a shard and those that pass
  const double shard = dense / sizes.dp + (experts > 0 ? experts / r : 0);
  const double table = vocabulary_rows(config, sizes) * work.h;
  double gradients = dense + experts + (stage == 0 ? table : 0);
  if (stage == 2) {
    gradients = (sizes.offload ? 0 : shard) +
                (trains ? passing_gradients(config, moe, sizes) : 0);
  }
  bill[MemoryKind::kGradient] = trains || stage > 0 ? gradients * work.e : 0;
  // ZeRO keeps f32 copies of 16-bit weights, from the beginning
  const double states = stage == 0 ? dense + experts : shard;
  const double masters = work.e == 2 ? 4 : 0;
  const double moments = bytes.optimizer - masters;
  bill[MemoryKind::kOptimizerState] =
      sizes.offload
          ? 0
          : states * ((trains ? moments : 0) + (stage > 0 ? masters : 0));

  // Messages: the loss beside the widest of them
  double exchanged = 0, counted = 0;
  for (std::int64_t i = 0; i < config.n_layer && sizes.ep > 1; ++i) {
    const std::int64_t n = experts_of_layer(moe, i);
    if (n == 1 || depends_on_routing(moe)) continue;
    exchanged =
        std::max(exchanged, static_cast<double>(n) * slots_of(work, moe, n) *
                                work.h / sizes.t * work.e);
  }
  for (const auto& [name, load] : record.loads) {
    if (!depends_on_routing(moe) || sizes.ep == 1) break;
    // Counts in forward, there and back in i64; or as many slots as were needed
    const auto n = static_cast<double>(load.exp_counts.size());
    if (moe.is_dropless) {
      counted = std::max(counted, 2 * n * 8);
      continue;
    }
    exchanged = std::max(exchanged, n * static_cast<double>(load.most_slots) *
                                        work.h / sizes.t * work.e);
  }
  double& messages = bill[MemoryKind::kCommunication];
  if (!trains) {
    messages = 0;
  } else if (stage > 0) {
    messages = std::max(sizes.loss_bytes + sizes.bucket_bytes + exchanged,
                        8 + std::max(8.0, sizes.gather_bytes));
  } else {
    messages = 8 + std::max({8.0, exchanged, sizes.dp > 1 ? dense * work.e : 0,
                             r > 1 ? experts * work.e : 0});
  }
  messages = std::max(messages, counted);
  if (sizes.bucket_bytes < 0) {
    bill[MemoryKind::kGradient] = messages = kNotPredicted;
  }
  return bill;
}

}  // namespace

void add_zero_sizes(BillSizes& sizes, const zero::ZeroOptimizer& zero) {
  const auto* flat = dynamic_cast<const zero::ZeroStage12*>(&zero);
  if (flat == nullptr) return;
  sizes.gather_bytes =
      std::max(sizes.gather_bytes, static_cast<double>(flat->gather_bytes()));
  sizes.bucket_bytes += static_cast<double>(flat->bucket_bytes());
  // They are reduced where they lie
  if (flat->has_large_gradients()) sizes.bucket_bytes = -HUGE_VAL;
}

Parameters parameters_here(const ModelConfig& config, const MoeOptions& moe,
                           const BillSizes& sizes) {
  const auto h = static_cast<double>(config.n_embd);
  const double t = sizes.t, expert_t = moe.expert_tensor_parallel ? t : 1;
  const double mlp = (8 * h * h + 4 * h) / t + h;
  Parameters here;
  here.dense = vocabulary_rows(config, sizes) * h +
               static_cast<double>(config.n_positions) * h + 2 * h;
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const auto experts = static_cast<double>(experts_of_layer(moe, i));
    // Attention and two norms
    here.dense += (3 * h * h + 3 * h) / t + h * h / t + h + 4 * h;
    if (experts == 1) {
      here.dense += mlp;
      continue;
    }
    here.dense += h * experts * (moe.gate.noise == Noise::kNoisyTopK ? 2 : 1);
    if (has_mlp_beside(moe)) here.dense += mlp;
    if (moe.use_residual) here.dense += 2 * h + 2;
    if (moe.shared_expert && moe.gate_shared_expert) here.dense += h;
    here.experts += experts / sizes.ep * ((8 * h * h + 4 * h) / expert_t + h);
  }
  return here;
}

double layer_elements(const MoeOptions& moe, std::int64_t experts, double slots,
                      double width, const BillSizes& sizes) {
  const double all = static_cast<double>(experts) * slots * width;
  // Replicated experts: slots are gathered behind them, and their gradients
  // before; cut experts gather twice as often, and sum f and g
  const double gathers =
      (moe.expert_tensor_parallel ? 4 : 2) * all_gather(sizes.t) +
      (moe.expert_tensor_parallel ? 2 : 0) * all_reduce(sizes.t);
  return 4 * all_gather(sizes.ep) * all / sizes.t + gathers * all;
}

Bill predicted_bill(const Options& options, const ModelConfig& config,
                    const MoeOptions& moe, const BillSizes& sizes,
                    const MoeRecord& record) {
  const Work work = work_of(options, config, sizes);
  const auto steps = static_cast<double>(options.steps);
  const auto micro = static_cast<double>(sizes.micro_batches);
  const Parameters here = parameters_here(config, moe, sizes);
  const Reduced reduced = reduced_bytes(moe, sizes, here, work.e);
  const double scalars =
      8 * (all_reduce(sizes.dp) + all_reduce(sizes.dp * sizes.t));
  Bill bill;
  bill.bytes =
      reduced.once + steps * (micro * layer_bytes(options, config, moe, sizes) +
                              reduced.step + scalars);
  if (depends_on_routing(moe)) {
    // On shapes, some micro-batches stand for all
    bill.bytes = options.backend == "sim"
                     ? kNotPredicted
                     : bill.bytes + routed_bytes(work, moe, sizes, record);
  }
  bill.memory = memory_bill(options, config, moe, sizes, here, record);
  return bill;
}

}  // namespace shardbook::moe
