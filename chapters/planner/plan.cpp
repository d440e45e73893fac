#include "chapters/planner/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/models/models.h"
#include "chapters/common/sharded/parts.h"
#include "chapters/planner/on_shapes.h"
#include "chapters/planner/step_parts.h"
#include "comm/device_mesh.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

Recompute recompute_of(const std::string& name) {
  if (name == "attention") return Recompute::kAttention;
  if (name == "blocks") return Recompute::kBlocks;
  SB_CHECK(name == "never", "--recompute ", name,
           ": the planner knows never, attention and blocks");
  return Recompute::kNothing;
}

/// Equal models are one object, which runs on shapes are remembered by. One that
/// does not train has no text, and nothing but these sizes.
std::shared_ptr<const ModelConfig> known_model(const ModelConfig& config) {
  const LlamaConfig& llama = config.llama;
  auto key = std::make_tuple(
      config.is_planned ? config.type : config.to_json(), config.vocab_size,
      config.n_positions, config.n_embd, config.n_layer, config.n_head,
      llama.kv_heads, llama.head_dim, llama.kv_rank, llama.q_rank,
      llama.rope_dim, llama.value_dim, llama.intermediate_size, llama.tied,
      llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm,
      llama.num_experts, llama.experts_per_token, llama.moe_intermediate_size,
      llama.shared_intermediate_size, llama.has_experts);
  static std::map<decltype(key), std::shared_ptr<const ModelConfig>> known;
  auto& model = known[std::move(key)];
  if (model == nullptr) model = std::make_shared<const ModelConfig>(config);
  return model;
}

}  // namespace

double PlanRequest::capacity() const {
  return memory_bytes > 0
             ? memory_bytes
             : static_cast<double>(base.cluster.device.memory_bytes);
}

std::string Plan::layout_text() const {
  std::string text;
  for (const auto& [axis, degree] :
       {std::pair("tp", setup.tp), std::pair("cp", setup.cp),
        std::pair("pp", setup.pp), std::pair("dp", setup.dp)}) {
    if (degree == 1) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis, degree);
  }
  if (text.empty()) text = "one device";
  if (setup.ep > 1) text += fmt::format(", EP {}", setup.ep);
  if (setup.sequence_parallel) text += ", SP";
  if (setup.zero_stage > 0) text += fmt::format(", ZeRO-{}", setup.zero_stage);
  if (offloads) text += ", offload";
  return text;
}

std::string Plan::work_text() const {
  std::string text = fmt::format("{} x {}", setup.micro_batches, micro_batch);
  if (setup.pp > 1) text += ", " + setup.schedule;
  if (setup.pp > 1 && setup.schedule == "interleaved") {
    text += fmt::format(" {}", setup.chunks);
  }
  if (recompute != "never") text += ", recompute " + recompute;
  return text;
}

Options options_of(const PlanRequest& request) {
  Options options = shape_options();
  options.chapter = "14_hybrid_3d";
  options.world_size = request.world_size;
  options.model = request.model;
  options.planned = request.stand_in.config;
  options.dtype = request.dtype();
  options.batch = request.batch;
  options.seq = request.seq();
  options.dropout = request.base.layout.dropout;
  options.cluster = request.cluster_source();
  return options;
}

void read_model(PlanRequest& request, const sim::Cluster& cluster) {
  request.stand_in = stand_in_of(request.model, request.seq());
  SB_CHECK(request.trains() || request.base.layout.dropout == 0, "--dropout ",
           request.base.layout.dropout, ": ", request.model,
           " is planned as a model without dropout; give 0");
  const ModelConfig config = model_config(options_of(request));
  HybridJob& base = request.base;
  base.cluster = cluster;
  base.sizes.hidden = config.n_embd;
  base.sizes.heads = config.n_head;
  base.sizes.vocabulary = config.vocab_size;
  base.sizes.positions = config.n_positions;
  base.layers = config.n_layer;
  base.is_tied = decoder_names(config).head.empty();
  if (config.is_llama()) base.sizes.model = known_model(config);
  base.is_synchronous = false;
  base.scatters_messages = false;
  base.bucket_bytes = static_cast<double>(hybrid::HybridOptions().bucket_bytes);
}

hybrid::HybridOptions chapter_options(const PlanRequest& request,
                                      const Plan& plan) {
  hybrid::HybridOptions setup = plan.setup;
  setup.recompute = plan.recompute;
  if (setup.pp == 1) return setup;
  const int chunks = setup.schedule == "interleaved" ? setup.chunks : 1;
  std::vector<std::int64_t> layers =
      balanced_blocks(request.base.layers, setup.pp * chunks);
  ++layers.front();  // the embedding
  ++layers.back();   // the head
  setup.partition = fmt::format("{}", fmt::join(layers, ","));
  return setup;
}

HybridJob job_of(const PlanRequest& request, const Plan& plan) {
  HybridJob job = request.base;
  job.sizes.vocabulary = padded_vocabulary(job.sizes.vocabulary, plan.setup.tp);
  job.layout.tp = plan.setup.tp;
  job.layout.cp = plan.setup.cp;
  job.layout.ep = plan.setup.ep;
  job.layout.cuts_tokens = plan.setup.sequence_parallel;
  job.layout.recompute = recompute_of(plan.recompute);
  job.layout.micro_batch = plan.micro_batch;
  job.gradient_dtype = job.layout.dtype;
  job.pp = plan.setup.pp;
  job.dp = plan.setup.dp;
  job.micro_batches = plan.setup.micro_batches;
  job.chunks = plan.setup.schedule == "interleaved" ? plan.setup.chunks : 1;
  job.is_zero_bubble = plan.setup.schedule == "zb-h1";
  job.blocks = balanced_blocks(job.layers, job.pp * job.chunks);
  job.zero_stage = plan.setup.zero_stage;
  job.offloads = plan.offloads;
  job.composes_stages = true;
  return job;
}

Prediction predict_plan(const PlanRequest& request, const Plan& plan) {
  const HybridJob job = job_of(request, plan);
  return {plan, hybrid_step(job), step_memory(job)};
}

double peak_flops(const PlanRequest& request) {
  const sim::DeviceSpec& device = request.base.cluster.device;
  const auto peak = device.peak_flops.find(request.dtype());
  SB_CHECK(peak != device.peak_flops.end(), "--dtype ",
           dtype_name(request.dtype()), ": the peak of ", device.name,
           " is not known in it");
  return peak->second;
}

double mfu(const PlanRequest& request, const Prediction& prediction) {
  return model_flops(job_of(request, prediction.plan)) / request.world_size /
         peak_flops(request) / prediction.step.seconds;
}

double tokens_per_s(const PlanRequest& request, const Prediction& prediction) {
  return static_cast<double>(request.batch * request.seq()) /
         prediction.step.seconds;
}

bool can_confirm(const PlanRequest& request, const Plan& plan) {
  if (plan.offloads) return false;
  // ZeRO-2 and -3, and rings of unlike ranks, run every rank
  constexpr int kMostFibers = 64;
  const int different = plan.setup.zero_stage >= 2
                            ? request.world_size / plan.setup.tp
                            : plan.setup.pp * plan.setup.cp;
  return different <= kMostFibers;
}

void confirm(const PlanRequest& request, Prediction& prediction) {
  if (!can_confirm(request, prediction.plan)) return;
  const Options options = options_of(request);
  hybrid::HybridOptions setup = chapter_options(request, prediction.plan);
  hybrid::check_legal(options, setup);
  const Report report = train_on_shapes(
      options, hybrid::fold_class(options, setup),
      [&](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, hybrid::topology_of(setup));
        run.train(options, *hybrid::make_strategy(options, setup, mesh));
      });
  prediction.confirmed_s = report.time.step_s;
  for (const RankReport& rank : report.ranks) {
    prediction.confirmed_bytes =
        std::max(prediction.confirmed_bytes, rank.peak_total.counted);
  }
}

// --- Bounds that cost nothing and leave out most plans -----------------------

namespace {

/// FLOPs per second that no operation of the device can exceed.
double best_rate(const PlanRequest& request) {
  const sim::DeviceSpec& device = request.base.cluster.device;
  double rate =
      peak_flops(request) * device.sustained *
      std::max(device.max_matmul_efficiency, device.max_attention_efficiency);
  for (const auto& [name, measured] : device.operations) {
    if (measured.s_per_flop > 0) rate = std::max(rate, 1 / measured.s_per_flop);
  }
  return rate;
}

/// The same for attention in one kernel.
double best_attention_rate(const PlanRequest& request) {
  const sim::Cluster& cluster = request.base.cluster;
  if (!cluster.software.fused_attention || !cluster.device.operations.empty()) {
    return best_rate(request);
  }
  return peak_flops(request) * cluster.device.sustained *
         cluster.device.max_attention_efficiency;
}

/// Bytes per second that no line of a rank exceeds.
double fastest_link(const sim::Cluster& cluster) {
  const double in_node = std::max(cluster.intra_node.bytes_per_s,
                                  cluster.intra_node.reduction_bytes_per_s);
  const double between = std::max(cluster.network.bytes_per_s,
                                  cluster.network.reduction_bytes_per_s) *
                         cluster.nics_per_node;
  const double mesh = static_cast<double>(cluster.mesh.size() + 1);
  return std::max(in_node * mesh, between);
}

/// Blocks on each rank of the pipeline.
std::vector<BlockCounts> blocks_of_ranks(const HybridJob& job) {
  std::vector<BlockCounts> blocks(static_cast<std::size_t>(job.pp));
  const std::vector<BlockCounts> stages = blocks_of_stages(job);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    blocks[i % blocks.size()].dense += stages[i].dense;
    blocks[i % blocks.size()].others += stages[i].others;
  }
  return blocks;
}

/// Bytes of the activations that the first rank keeps at least: those of its
/// blocks' tables, without statistics.
double least_activations(const HybridJob& job) {
  const double t = job.layout.tp;
  double width = static_cast<double>(job.sizes.hidden);  // a block's input
  if (job.layout.recompute == Recompute::kBlocks) {
    width /= job.layout.cuts_tokens ? t : 1;
  } else {
    const auto kept = [&](bool is_dense) {
      double sum = 0;
      for (const BlockPart& part : block_of_kind(job, is_dense)) {
        sum += job.layout.cuts_tokens ? part.kept() / t : part.kept(t);
      }
      return sum;
    };
    width = std::min(kept(true), kept(false));
  }
  const double tokens =
      static_cast<double>(job.layout.micro_batch * job.sizes.seq) /
      job.layout.cp;
  std::int64_t blocks = job.blocks[0];  // of the smallest stage
  for (std::size_t i = 0; i < job.blocks.size();
       i += static_cast<std::size_t>(job.pp)) {
    blocks = std::min(blocks, job.blocks[i]);
  }
  return live_sets(job, 0) * static_cast<double>(blocks) * tokens * width *
         job.element();
}

/// Elements of a rank's weights, norms and biases left out; of experts, those that
/// this rank of ep has.
struct Weights {
  double dense = 0, experts = 0;
  double all() const { return dense + experts; }
};
Weights weights_of(const HybridJob& job, const BlockCounts& blocks) {
  Weights weights;
  const auto add = [&](bool is_dense, double times) {
    if (times == 0) return;
    for (const BlockPart& part : block_of_kind(job, is_dense)) {
      if (part.kind != PartKind::kProduct) continue;
      const double each = times * static_cast<double>(part.in * part.out);
      if (part.experts > 1) {
        weights.experts +=
            each * static_cast<double>(part.experts) / job.layout.ep;
      } else {
        weights.dense += each / (part.cut == Cut::kWhole ? 1 : job.layout.tp);
      }
    }
  };
  add(true, blocks.dense);
  add(false, blocks.others);
  return weights;
}

/// The same of the rank with most parameters.
Weights most_weights(const HybridJob& job) {
  const std::vector<BlockCounts> blocks = blocks_of_ranks(job);
  Weights most;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const bool is_first = rank == 0, is_last = rank + 1 == blocks.size();
    const bool has_two = is_first && is_last && !job.is_tied;
    const int tables = has_two ? 2 : is_first || is_last ? 1 : 0;
    Weights own = weights_of(job, blocks[rank]);
    own.dense += tables * job.table();
    if (own.all() > most.all()) most = own;
  }
  return most;
}

}  // namespace

double least_seconds(const PlanRequest& request, const Plan& plan) {
  const HybridJob job = job_of(request, plan);
  const double rate = best_rate(request);
  const auto m = static_cast<double>(job.micro_batches);
  const double tokens =
      static_cast<double>(job.layout.micro_batch * job.sizes.seq) /
      job.layout.cp;
  // Masked attention needs half of its two products, and backward five of them
  const BlockPart& part = attention_of(job);
  const double backward = part.backward_operations(1) / part.operations(1);
  const double attention =
      attention_products(job) / 2 * (plan.recompute == "never" ? 1 : 2) +
      attention_products(job) / 2 * backward;
  const double flops = 2 * tokens / job.layout.tp;
  const double head = 2 * tokens * 3 * job.table() / rate;
  // Sums over tp in forward wait for their messages; those of experts go over ep
  const double t = job.layout.tp;
  const double link = fastest_link(request.base.cluster);
  double messages = 0;
  if (!job.overlaps_tensor)
    messages = (job.sizes.has_own_experts() ? 1 : 2) * (t - 1) / t * tokens *
               static_cast<double>(job.sizes.hidden) * job.element() / link;

  const auto of_kind = [&](bool is_dense) {
    return flops * (products_of(block_of_kind(job, is_dense)) *
                        (plan.recompute == "blocks" ? 4 : 3) / rate +
                    attention / best_attention_rate(request)) +
           messages;
  };
  const double dense = of_kind(true), other = of_kind(false);
  const auto seconds = [&](const BlockCounts& blocks) {
    return blocks.dense * dense + blocks.others * other;
  };

  // The last rank waits until the first micro-batch arrives, and the first rank
  // until the last one comes back. Zero bubble fills the second wait with
  // gradients of weights.
  const std::vector<BlockCounts> blocks = blocks_of_ranks(job),
                                 stages = blocks_of_stages(job);
  double slowest = 0, before = 0;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const bool is_last = rank + 1 == blocks.size();
    const double own = seconds(blocks[rank]) + (is_last ? head : 0);
    slowest = std::max(slowest, m * own + before);
    before += seconds(stages[rank]) * (job.is_zero_bubble ? 1.0 / 3 : 1);
  }

  // Sums of gradients that wait for all backwards
  double sums = 0;
  const double d = job.replicas();
  if (d > 1 && job.zero_stage <= 1 && !job.overlaps_gradients) {
    sums = (d - 1) / d * most_weights(job).dense * job.element() / link;
  }
  return slowest + sums;
}

double least_bytes(const PlanRequest& request, const Plan& plan) {
  const HybridJob job = job_of(request, plan);
  const Weights most = most_weights(job);
  const zero::ModelStates states = job.states(most.all(), most.experts);
  const double kept = least_activations(job);
  if (plan.offloads) {
    return kept + (job.zero_stage == 3 ? 0 : states.parameters);
  }
  Weights first = weights_of(job, blocks_of_ranks(job)[0]);
  first.dense += job.table();
  zero::ModelStates of_first = job.states(first.all(), first.experts);
  // A rank has no gradients yet where all its forwards come first
  if (job.micro_batches <= job.pp * (job.chunks > 1 ? 2 : 1)) {
    of_first.gradients = 0;
  }
  return std::max(states.total(), of_first.total() + kept);
}

}  // namespace shardbook::planner
