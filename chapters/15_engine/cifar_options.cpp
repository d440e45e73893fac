// The options of DeepSpeed's script, and its config.

#include <fmt/format.h>

#include <memory>
#include <numeric>

#include "chapters/15_engine/cifar_strategy.h"
#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/common/run/option_values.h"
#include "core/check.h"

namespace shardbook::moe {
namespace {

constexpr int kBatch = 16;

/// In the script's words and order.
constexpr const char* kConfig = R"({{
  "train_batch_size": {batch},
  "steps_per_print": 2000,
  "optimizer": {{
    "type": "Adam",
    "params": {{"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                "weight_decay": 3e-7}}
  }},
  "scheduler": {{
    "type": "WarmupLR",
    "params": {{"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                "warmup_num_steps": 1000}}
  }},
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "bf16": {{"enabled": {bf16}}},
  "fp16": {{
    "enabled": {fp16},
    "fp16_master_weights_and_grads": false,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 15
  }},
  "wall_clock_breakdown": false,
  "zero_optimization": {{
    "stage": {stage},
    "allgather_partitions": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 50000000,
    "reduce_bucket_size": 50000000,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "cpu_offload": {offload}
  }}
}})";

DType dtype_of(const CifarOptions& cifar) {
  return cifar.dtype == "fp64" ? DType::kF64 : engine::dtype_of(cifar.dtype);
}

/// Options of the layers of experts, which the net has only with --moe.
const char* const kOfExperts[] = {
    "--num-experts", "--ep-world-size",   "--mlp-type",
    "--top-k",       "--min-capacity",    "--noisy-gate-policy",
    "--share-mlp",   "--moe-param-group", "--aux-coefficient"};

void check(const Options& options, const CifarOptions& cifar) {
  SB_CHECK(cifar.stage < 3,
           "--stage 3: it gathers every parameter for each micro-batch, and no "
           "rank has experts whole, so DeepSpeed refuses it; give 0, 1 or 2");
  SB_CHECK(!cifar.cpu_offload || cifar.stage == 2,
           "--cpu-offload: gradients stream to the host as shards; give "
           "--stage 2 as well");
  SB_CHECK(kBatch % options.world_size == 0, "--world-size ",
           options.world_size, ": does not divide the batch of ", kBatch,
           " images; give 1, 2, 4, 8 or 16");
  GateOptions gate = cifar.net.moe.gate;
  SB_CHECK(gate.noise != Noise::kRSample || gate.k == 1,
           "--noisy-gate-policy RSample: samples the one choice of --top-k 1, "
           "not of ",
           gate.k);
  for (const int experts : cifar.net.num_experts) {
    gate.num_experts = experts;
    check_gate(gate);
  }
  cifar_groups(cifar, options.world_size);
}

}  // namespace

void add_cifar_options(CommandLine& line, Options& options,
                       CifarOptions& cifar) {
  struct Names {
    bool moe = false, param_group = false;
    std::string num_experts = "1", mlp_type = "standard", policy = "none";
  };
  const auto names = std::make_shared<Names>();
  MoeOptions& moe = cifar.net.moe;
  moe.aux_coefficient = 0;
  moe.gate.min_capacity = 0;
  options.chapter = "13_moe";
  options.model = "cifar";
  options.cluster = "none";
  options.seq = 1;  // one label for an image
  options.data.clear();
  options.steps = 20;
  line.add("--world-size", &options.world_size, "number of ranks", 1, 1 << 16);
  line.add("--backend", &options.backend, "what the ranks are",
           {"threads", "gloo"});
  accept_local_rank(line);
  line.add("--moe", &names->moe, "layers of experts in the place of fc3");
  line.add("--num-experts", &names->num_experts,
           "experts of each layer, a list: 2,4 makes two layers");
  line.add("--ep-world-size", &cifar.ep,
           "ranks that share a set of experts; 0: as many as possible");
  line.add("--mlp-type", &names->mlp_type,
           "residual: an MLP beside the experts", {"standard", "residual"});
  line.add("--share-mlp", &cifar.net.share_mlp,
           "--mlp-type residual: the same MLP in all layers, as in the script");
  line.add("--top-k", &moe.gate.k, "experts that an image visits", 1);
  line.add("--min-capacity", &moe.gate.min_capacity,
           "the fewest slots of an expert", 0, 1 << 20);
  line.add("--noisy-gate-policy", &names->policy, "noise in the gate",
           {"none", "RSample", "Jitter"});
  line.add("--moe-param-group", &names->param_group,
           "experts form parameter groups of their own; they always do");
  line.add("--aux-coefficient", &moe.aux_coefficient,
           "of the load-balancing loss, which the script leaves out");
  line.add("--dtype", &cifar.dtype, "fp16 has a dynamic loss scale",
           {"fp16", "bf16", "fp32", "fp64"});
  line.add("--stage", &cifar.stage, "of ZeRO, 0 to 2", 0, 3);
  line.add("--cpu-offload", &cifar.cpu_offload,
           "--stage 2: the optimizer on the host");
  line.add("--data", &options.data,
           "the folder cifar-10-batches-bin; empty: images are made up");
  line.add("--steps", &options.steps, "optimizer steps, of 16 images each");
  line.add("--cluster", &options.cluster,
           "where virtual time passes: a preset, FILE.json, or none");
  line.add("--seed", &options.seed, "of weights and made-up images");
  line.add("--check", &options.check, "compare with one device");
  line.add("--format", &options.format, "of the report", {"text", "json"});
  line.add("--report", &options.report, "write the report here, as JSON");
  line.add("--log", &options.log, "one JSON object per step (JSON lines)");
  line.refuse("--residual", "the script's name is --mlp-type residual");
  line.refuse("--ep", "the script's name is --ep-world-size");
  line.refuse("--batch", "the script's config has train_batch_size 16");
  line.refuse("--lr", "the script's config has a rate that rises to 0.001");
  line.after_parse([&line, &options, &cifar, &moe, names] {
    for (const char* each : kOfExperts) {
      SB_CHECK(names->moe || !line.has(each), each,
               ": the net has no experts; give --moe as well");
    }
    cifar.net.num_experts.clear();
    if (names->moe) {
      cifar.net.num_experts =
          read_counts("--num-experts", names->num_experts,
                      "give numbers of experts such as 2,4");
    }
    moe.use_residual = names->mlp_type == "residual";
    moe.gate.noise = noise_of(engine::internal::lower_case(names->policy));
    check(options, cifar);
    const auto config = cifar_config(cifar);
    options.batch = config.batch.train;
    options.optimizer = config.optimizer.name();
    options.optimizer_options = config.optimizer.params;
    options.clip = config.gradient_clipping;
    options.rate = engine::schedule_of(config, config.optimizer);
    options.dtype = cifar.net.dtype = dtype_of(cifar);
    cifar.net.seed = options.seed;
  });
  line.at_end([&line, &options] { options.effective = line.values(); });
}

engine::DeepSpeedConfig cifar_config(const CifarOptions& cifar) {
  const std::string text = fmt::format(
      fmt::runtime(kConfig), fmt::arg("batch", kBatch),
      fmt::arg("bf16", cifar.dtype == "bf16"),
      fmt::arg("fp16", cifar.dtype == "fp16"), fmt::arg("stage", cifar.stage),
      fmt::arg("offload", cifar.cpu_offload));
  return engine::DeepSpeedConfig::parse(text, "cifar_moe");
}

GroupSizes cifar_groups(const CifarOptions& cifar, int ranks) {
  GroupSizes sizes = {.world = ranks, .ep = cifar.ep};
  const std::vector<int>& all = cifar.net.num_experts;
  if (sizes.ep == 0) {
    sizes.ep = ranks;
    for (const int experts : all) sizes.ep = std::gcd(sizes.ep, experts);
    if (all.empty()) sizes.ep = 1;
  }
  SB_CHECK(ranks % sizes.ep == 0, "--ep-world-size ", sizes.ep, ": the ", ranks,
           " ranks do not divide by it; give a divisor of ", ranks);
  for (const int experts : all) {
    SB_CHECK(experts % sizes.ep == 0, "--ep-world-size ", sizes.ep, ": ",
             experts,
             " experts do not divide by it; every rank has equally many");
  }
  return sizes;
}

}  // namespace shardbook::moe
