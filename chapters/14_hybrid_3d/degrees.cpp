#include "chapters/14_hybrid_3d/degrees.h"

#include <algorithm>
#include <map>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/stages.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::hybrid {
namespace {

std::string axes_of(const std::string& order) {
  static const std::map<std::string, std::string> known = {
      {"megatron", "tp-cp-dp-pp"},
      {"megatron-pp-dp", "tp-cp-pp-dp"},
      {"deepspeed", "tp-cp-dp-pp"},
      {"colossal-ai", "tp-cp-pp-dp"}};
  const auto found = known.find(order);
  if (found != known.end()) return found->second;
  std::vector<std::string> axes = split_axes(order);
  std::sort(axes.begin(), axes.end());
  SB_CHECK((axes == std::vector<std::string>{"cp", "dp", "pp", "tp"}),
           "--order ", order,
           ": give megatron, megatron-pp-dp, deepspeed, colossal-ai, or the "
           "axes tp, cp, dp, pp in an order, such as tp-cp-dp-pp");
  return order;
}

/// The largest divisor of n that is at most `most`.
std::int64_t divisor_below(std::int64_t n, std::int64_t most) {
  std::int64_t divisor = std::max<std::int64_t>(std::min(n, most), 1);
  while (n % divisor != 0) --divisor;
  return divisor;
}

// --- Rules, in the order in which they are tried -----------------------------

void check_product(const Options& options, HybridOptions& setup) {
  // Each is at most 2^20
  const std::int64_t others = std::int64_t{setup.tp} * setup.cp * setup.pp;
  SB_CHECK(others <= options.world_size &&
               (setup.dp > 0 || options.world_size % others == 0),
           "--world-size ", options.world_size, ": --tp ", setup.tp, ", --cp ",
           setup.cp, ", --pp ", setup.pp, " make replicas of ",
           how_many(others, "rank"), "; give a multiple of ", others);
  if (setup.dp == 0) setup.dp = static_cast<int>(options.world_size / others);
  SB_CHECK(setup.dp * others == options.world_size, "--world-size ",
           options.world_size, ": --dp ", setup.dp, " x --tp ", setup.tp,
           " x --cp ", setup.cp, " x --pp ", setup.pp, " are ",
           how_many(setup.dp * others, "rank"), "; give --world-size ",
           setup.dp * others);
}

void check_zero(const HybridOptions& setup) {
  SB_CHECK(setup.zero_stage <= 1 || setup.pp == 1, "--zero-stage ",
           setup.zero_stage, ", --pp ", setup.pp,
           setup.zero_stage == 2
               ? ": a stage accumulates gradients over all micro-batches, so "
                 "shards of them would be reduced after every one: m times "
                 "the traffic; give --zero-stage 1"
               : ": each micro-batch would gather the stage's parameters for "
                 "its forward and again for its backward: 2m times; give "
                 "--zero-stage 1");
  SB_CHECK(!setup.overlap_grad_reduce || setup.zero_stage <= 1,
           "--overlap-grad-reduce: with --zero-stage ", setup.zero_stage,
           " gradients always leave during backward; leave it out, or give "
           "--zero-stage 0 or 1");
}

void check_schedule(const HybridOptions& setup) {
  SB_CHECK(setup.schedule != "pipedream" && setup.schedule != "pipedream-2bw",
           "--schedule ", setup.schedule,
           ": each stage updates by itself, and there is no point at which the "
           "gradients of all replicas are complete; give a schedule that "
           "flushes, such as 1f1b");
  SB_CHECK(setup.zero_stage <= 1 || setup.schedule == "1f1b", "--schedule ",
           setup.schedule, ": with --zero-stage ", setup.zero_stage,
           " there is one stage, which no schedule changes; leave it out");
  SB_CHECK(setup.zero_stage <= 1 ||
               setup.recomputed_stages() == pipeline::Recompute::kNever,
           "--recompute ", setup.recompute, ": not with --zero-stage ",
           setup.zero_stage, ", which has no stages; give blocks or attention");
}

/// Convolutions and batch norms work with replicas and stages only.
void check_image_model(const HybridOptions& setup, const ModelConfig& config) {
  SB_CHECK(setup.tp == 1, "--tp ", setup.tp,
           ": this tensor parallelism cuts the matrices, heads and vocabulary "
           "of a GPT, and no convolution of a ",
           config.type, "; give 1");
  SB_CHECK(setup.cp == 1, "--cp ", setup.cp,
           ": images have no sequence of tokens to cut; give 1");
  SB_CHECK(setup.cp_kind == "ring" && setup.cp_layout == "contiguous",
           "--cp-kind ", setup.cp_kind, ", --cp-layout ", setup.cp_layout,
           ": images have no sequence of tokens to cut; leave them out");
  SB_CHECK(!setup.sequence_parallel,
           "--sequence-parallel: images have no sequence of tokens to cut; "
           "leave it out");
  SB_CHECK(!setup.has_experts(), "--num-experts ", setup.experts,
           ": experts take the place of a GPT's MLPs, and a ", config.type,
           " has none; give 1");
  SB_CHECK(setup.zero_stage <= 1, "--zero-stage ", setup.zero_stage,
           ": stages 2 and 3 train a GPT only here; give 0 or 1");
  SB_CHECK(setup.recompute != "attention", "--recompute attention: a ",
           config.type, " has none; give blocks");
  SB_CHECK(!setup.accumulate_f32,
           "--accumulate-f32: one device sums in 16 bits, and batch norms make "
           "every difference grow from step to step; leave it out");
}

/// Buckets and shards sum whole parameters: no two ranks of tp share keys.
void check_llama(const Options& options, const HybridOptions& setup,
                 const ModelConfig& config) {
  const std::int64_t keys = config.llama.kv_heads;
  SB_CHECK(keys % setup.tp == 0, "--tp ", setup.tp, ": ",
           how_many(keys, "head"),
           " of keys do not divide by it, and ranks that share them "
           "(07_tensor_parallel) are not part of a mesh here; give ",
           divisor_below(keys, setup.tp));
  const std::int64_t hidden = block_table(config).down.in;
  SB_CHECK(hidden % setup.tp == 0, "--tp ", setup.tp, ": ", hidden,
           " hidden units do not divide by it; give ",
           divisor_below(hidden, setup.tp));
  const std::int64_t shared = config.llama.shared_intermediate_size;
  SB_CHECK(shared % setup.tp == 0, "--tp ", setup.tp, ": ", shared,
           " hidden units of a shared expert do not divide by it; give ",
           divisor_below(shared, setup.tp));
  SB_CHECK(
      !config.llama.is_latent() || setup.cp == 1, "--cp ", setup.cp,
      ": values of latent attention have a width of their own, and no ring "
      "here carries them; give 1");
  SB_CHECK(!setup.has_experts(), "--num-experts ", setup.experts,
           ": takes the place of a GPT's MLPs; give 1, or a GPT");
  if (!setup.has_own_experts) return;
  SB_CHECK(!config.llama.has_balancing_loss(), "--model ", options.model, ": ",
           kBalancingLossInParts);
  SB_CHECK(setup.tp == 1 || setup.sequence_parallel, "--tp ", setup.tp,
           ": each rank of tp routes tokens of its own to the experts of ",
           options.model, "; give --sequence-parallel as well");
  SB_CHECK(setup.zero_stage <= 1, "--zero-stage ", setup.zero_stage,
           ": stages 2 and 3 train dense blocks and a GPT's experts here; give "
           "0 or 1, or 13_moe");
}

void check_model(const Options& options, const HybridOptions& setup,
                 const ModelConfig& config) {
  if (config.is_image()) return check_image_model(setup, config);
  SB_CHECK(config.has_blocks(), "--model ", options.model,
           ": this chapter cuts the layers of a GPT and the stages of a "
           "ResNet; give gpt-nano, gpt2 or resnet18, or another one of their "
           "families");
  SB_CHECK(config.n_head % setup.tp == 0, "--tp ", setup.tp, ": ",
           how_many(config.n_head, "head"), " do not divide by it; give ",
           divisor_below(config.n_head, setup.tp));
  if (config.is_llama()) check_llama(options, setup, config);
  SB_CHECK(!setup.sequence_parallel || setup.tp > 1,
           "--sequence-parallel: tokens are cut inside the tensor-parallel "
           "group, which has one rank; give --tp 2 or more");
  SB_CHECK(setup.cp > 1 ||
               (setup.cp_layout == "contiguous" && setup.cp_kind == "ring"),
           "--cp-kind ", setup.cp_kind, ", --cp-layout ", setup.cp_layout,
           ": the sequence is not cut; give --cp 2 or more");
  const auto sequence = setup.sequence();
  SB_CHECK(sequence.kind == sequence_parallel::Kind::kRing ||
               sequence.layout == sequence_parallel::Layout::kContiguous,
           "--cp-layout ", setup.cp_layout,
           ": only --cp-kind ring computes blocks that a layout can balance; "
           "give contiguous");
  const std::int64_t heads = config.n_head / setup.tp;
  SB_CHECK(sequence.kind != sequence_parallel::Kind::kUlysses ||
               heads % setup.cp == 0,
           "--cp ", setup.cp, ": Ulysses gives each rank equally many of ",
           how_many(heads, "head"), "; give ", divisor_below(heads, setup.cp));
  const bool has_halves = sequence.layout == sequence_parallel::Layout::kZigzag;
  const std::int64_t parts = std::int64_t{setup.cp} * (has_halves ? 2 : 1) *
                             (setup.sequence_parallel ? setup.tp : 1);
  SB_CHECK(options.seq % parts == 0, "--seq ", options.seq,
           ": the tokens are cut into ", parts, " equal parts; give ",
           (options.seq / parts + 1) * parts);
  SB_CHECK(options.dropout == 0 || setup.cp == 1 || setup.tp == 1, "--dropout ",
           options.dropout, ": not with both --tp ", setup.tp, " and --cp ",
           setup.cp, "; give 0");
}

void check_experts(const Options& options, const HybridOptions& setup,
                   const ModelConfig& config) {
  const std::int64_t experts =
      setup.has_own_experts ? config.llama.num_experts : setup.experts;
  if (setup.has_own_experts) {
    const HybridOptions none;
    SB_CHECK(setup.top_k == none.top_k && setup.noise == none.noise &&
                 setup.capacity_factor == none.capacity_factor &&
                 setup.aux_coefficient == none.aux_coefficient &&
                 !setup.expert_tp,
             "--model ", options.model,
             ": its config says how tokens choose experts; of their options, "
             "give --ep alone");
  } else if (!setup.has_experts()) {
    SB_CHECK(setup.experts == 1, "--num-experts ", setup.experts,
             ": give the experts of each layer, or 1 for an ordinary MLP");
    SB_CHECK(setup.ep == 1 && setup.top_k == 1 && !setup.expert_tp &&
                 setup.noise == "none",
             "--ep ", setup.ep, ", --top-k ", setup.top_k, ", --noise ",
             setup.noise, setup.expert_tp ? ", --expert-tp" : "",
             ": there are no experts; give --num-experts 2 or more");
  }
  SB_CHECK(setup.dp % setup.ep == 0, "--ep ", setup.ep, ": ",
           how_many(setup.dp, "replica"),
           " cannot form groups of so many, which share experts; give ",
           divisor_below(setup.dp, setup.ep));
  SB_CHECK(experts % setup.ep == 0, "--ep ", setup.ep, ": ",
           how_many(experts, "expert"), " cannot be divided by it; give ",
           divisor_below(experts, setup.ep));
  if (!setup.has_experts()) return;
  SB_CHECK(!setup.expert_tp || setup.tp > 1,
           "--expert-tp: cuts experts over tensor-parallel ranks; give --tp 2 "
           "or more");
  SB_CHECK(setup.zero_stage <= 2, "--zero-stage ", setup.zero_stage,
           ", --num-experts ", setup.experts,
           ": stage 3 would gather all experts of a rank for each micro-batch, "
           "when a token visits ",
           setup.top_k,
           " of them (DeepSpeed refuses it, too); give 1 or 2, and --ep to cut "
           "the experts");
  const moe::MoeOptions moe = setup.moe();
  moe::check_gate(moe.gate);
  const std::int64_t rows = options.batch / (setup.dp * setup.micro_batches);
  const std::int64_t tokens = rows * options.seq / setup.cp;
  moe::check_slots(moe::capacity(tokens, moe.gate, true), setup.tp);
}

void check_precision(const Options& options, const HybridOptions& setup) {
  SB_CHECK(!setup.accumulate_f32 || dtype_bytes(options.dtype) == 2,
           "--accumulate-f32: gradients of ", dtype_name(options.dtype),
           " are summed as they are; give --dtype bf16 or f16");
  SB_CHECK(!setup.accumulate_f32 || setup.zero_stage <= 1,
           "--accumulate-f32: not with --zero-stage ", setup.zero_stage,
           "; give 0 or 1");
}

void check_batch(const Options& options, const HybridOptions& setup,
                 const ModelConfig& config) {
  const std::int64_t parts = setup.dp * setup.micro_batches;
  const std::string shared = how_many(setup.dp, "replica") + " with " +
                             how_many(setup.micro_batches, "micro-batch") +
                             " each";
  SB_CHECK(options.batch % parts == 0, "--batch ", options.batch, ": ", shared,
           " cannot have equally many samples; give ",
           (options.batch / parts + 1) * parts);
  if (!config.is_image()) return;
  // A batch norm needs two values of each channel; the stem halves height and
  // width twice, each later stage once
  std::int64_t side = options.image_size;
  for (std::size_t i = 0; i <= config.depths.size(); ++i) side = (side + 1) / 2;
  SB_CHECK(options.batch / parts * side * side > 1, "--batch ", options.batch,
           ": ", shared,
           ": a micro-batch would be one image, and the last batch norms "
           "one value of each channel, which is its own mean; give --batch ",
           2 * parts, ", fewer micro-batches or larger images");
}

}  // namespace

const char* const kOrderHelp =
    "ranks next to each other differ in the first axis: megatron "
    "(tp-cp-dp-pp), megatron-pp-dp (tp-cp-pp-dp), deepspeed (as megatron), "
    "colossal-ai (tp-cp-pp-dp, as for its ring attention), or the axes in any "
    "order";

sequence_parallel::SequenceOptions HybridOptions::sequence() const {
  sequence_parallel::SequenceOptions options;
  options.kind = sequence_parallel::kind_of(cp_kind);
  options.layout = sequence_parallel::layout_of(cp_layout);
  return options;
}

std::map<std::string, std::string> HybridOptions::agreed() const {
  if (!has_experts()) return {};
  return {{"groups of tokens", std::to_string(dp * cp * micro_batches)}};
}

moe::MoeOptions HybridOptions::moe() const {
  moe::MoeOptions options;
  options.gate.num_experts = experts;
  options.gate.k = top_k;
  options.gate.capacity_factor = capacity_factor;
  options.expert_tensor_parallel = expert_tp;
  options.aux_coefficient = aux_coefficient;
  options.gate.noise = moe::noise_of(noise);
  return options;
}

pipeline::Recompute HybridOptions::recomputed_stages() const {
  if (recompute == "blocks" || recompute == "attention") {
    return pipeline::Recompute::kNever;
  }
  return pipeline::recompute_from_name(recompute);
}

DynamicLossScaler HybridOptions::loss_scaler(DType dtype) const {
  LossScaleOptions options = loss_scale;
  // bf16 has the range of f32
  if (dtype != DType::kF16) options.scale = 1;
  if (!scaler.empty()) {
    options.kind = scaler == "megatron"           ? ScalerKind::kMegatron
                   : scaler == "deepspeed-0.17.1" ? ScalerKind::kDeepSpeed0171
                                                  : ScalerKind::kDeepSpeed;
  }
  return DynamicLossScaler(options);
}

Topology topology_of(const HybridOptions& setup) {
  std::string order = axes_of(setup.order);
  const bool has_ep = setup.ep > 1;
  if (has_ep) order.replace(order.find("dp"), 2, "ep-edp");
  return Topology::from_order(order,
                              {{"tp", setup.tp},
                               {"cp", setup.cp},
                               {has_ep ? "edp" : "dp", setup.dp / setup.ep},
                               {"ep", setup.ep},
                               {"pp", setup.pp}});
}

Topology parts_topology(const HybridOptions& setup) {
  const std::string order = axes_of(setup.order);
  const bool tp_is_faster = order.find("tp") < order.find("dp");
  return Topology::from_order(tp_is_faster ? "tp-ep" : "ep-tp",
                              {{"tp", setup.tp}, {"ep", setup.ep}});
}

int replica_of(const Topology& topology, int rank) {
  if (topology.has_axis("dp")) return topology.coordinate(rank, "dp");
  return topology.coordinate(rank, "edp") * topology.size("ep") +
         topology.coordinate(rank, "ep");
}

void check_legal(const Options& options, HybridOptions& setup) {
  check_product(options, setup);
  check_zero(setup);
  check_schedule(setup);
  const ModelConfig config = model_config(options);
  setup.has_own_experts = config.llama.num_experts > 0;
  check_model(options, setup, config);
  check_batch(options, setup, config);
  check_experts(options, setup, config);
  check_precision(options, setup);
  topology_of(setup);
  const int layers = layers_of(config)->size();
  const auto check_stages = [&](int stages) {
    SB_CHECK(stages <= layers, "--pp ", setup.pp, ", --schedule ",
             setup.schedule, ": ", how_many(stages, "stage"), "; ",
             options.model, " has ", layers_text(options, layers),
             "; give at most one stage per layer");
  };
  // A rank has a stage or more: too many ranks need no list of their actions
  if (!setup.schedule.ends_with(".json")) check_stages(setup.pp);
  check_stages(schedule_of(setup).num_stages);
}

std::string refusal(const Options& options, HybridOptions setup) {
  try {
    check_legal(options, setup);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

pipeline::Schedule schedule_of(const HybridOptions& setup) {
  pipeline::schedules::ScheduleOptions schedule;
  schedule.num_ranks = setup.pp;
  schedule.micro_batches = static_cast<int>(setup.micro_batches);
  schedule.chunks = setup.chunks;
  return pipeline::schedules::make_schedule(setup.schedule, schedule);
}

std::vector<MicroBatch> pieces_of(const Options& options,
                                  const HybridOptions& setup, int dp_rank) {
  const std::int64_t rows = options.batch / (setup.dp * setup.micro_batches);
  std::vector<MicroBatch> pieces;
  for (std::int64_t b = 0; b < setup.micro_batches; ++b) {
    const std::int64_t first = (dp_rank * setup.micro_batches + b) * rows;
    pieces.push_back({BatchSlice{first, 1}, rows});
  }
  return pieces;
}

}  // namespace shardbook::hybrid
