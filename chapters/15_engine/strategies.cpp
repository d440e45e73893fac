#include "chapters/15_engine/strategies.h"

#include <fmt/format.h>

#include <algorithm>

#include "chapters/00_single_device/single_device.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/15_engine/engine_strategy.h"
#include "chapters/15_engine/internal/config_rules.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::engine {
namespace {

/// Keys that only stages 0 to 3 of plain models follow.
void refuse_reduction_keys(const DeepSpeedConfig& config,
                           const std::string& name, bool has_offload = false) {
  const zero::ZeroOptions& zero = config.zero;
  const std::string key =
      config.prescale_gradients                 ? "/prescale_gradients"
      : config.gradient_predivide_factor != 1   ? "/gradient_predivide_factor"
      : !config.communication_data_type.empty() ? "/communication_data_type"
      : !zero.reduce_scatter ? "/zero_optimization/reduce_scatter"
      : !has_offload && zero.offload_optimizer
          ? "/zero_optimization/offload_optimizer"
          : "";
  SB_CHECK(key.empty(), config.label, ": ", key, " with ", name,
           ": its chapter has no such choice; leave the key out");
}

void refuse_recompute(const DeepSpeedConfig& config, const std::string& name) {
  SB_CHECK(config.book.recompute == "never", config.label,
           ": /shardbook/recompute \"", config.book.recompute, "\" with ", name,
           ": its chapter keeps all activations; leave the key out");
}

void refuse_fp16(const DeepSpeedConfig& config, const std::string& name) {
  SB_CHECK(!config.fp16.enabled, config.label, ": /fp16/enabled with ", name,
           ": its chapter does not scale the loss; give /bf16/enabled");
}

/// A chapter's strategy under the engine.
template <typename Make>
auto under_engine(const DeepSpeedConfig& config, const BatchSizes& sizes,
                  Make make) {
  return [=](const Options& options, DeviceMesh& mesh) {
    return std::make_unique<ConfiguredStrategy>(
        options, config, sizes, mesh.world(), make(options, mesh));
  };
}

/// Dtypes of sums that only some chapters have.
void refuse_dtypes(const Options& options, const DeepSpeedConfig& config,
                   bool sums_wider, bool needs_hybrid, bool has_experts) {
  const BookConfig& book = config.book;
  const int stage = config.zero.stage;
  const bool is_plain = book.tensor_parallel_mode == "1d" &&
                        book.sharding == "zero" && !has_experts;
  // Stage 1 sums whole gradients (chapter 14), 2 and 3 shards (chapter 03)
  const bool has_sums = is_plain && (stage <= 1 || !needs_hybrid);
  SB_CHECK(!sums_wider || has_sums, config.label,
           ": /data_types/grad_accum_dtype \"fp32\" in ",
           dtype_name(options.dtype), " with /zero_optimization/stage ", stage,
           stage > 1 ? " and parallel layers, stages, /shardbook/recompute "
                       "\"attention\","
                     : " and",
           " /shardbook/experts, a sharding, or 2D to 3D layers: their "
           "chapters sum micro-batches in the dtype of training; leave the key "
           "out");
  SB_CHECK(
      !sums_wider || stage > 1 || !model_config(options).is_image(),
      config.label, ": /data_types/grad_accum_dtype \"fp32\" in ",
      dtype_name(options.dtype), " with --model ", options.model,
      ": chapter 14, which sums so, does not for images; leave the key out");
  const std::string& name = config.seq_parallel_communication_data_type;
  SB_CHECK(config.degrees.cp == 1 || name.empty() ||
               dtype_of(name) == options.dtype || options.dtype == DType::kF64,
           config.label, ": /seq_parallel_communication_data_type \"", name,
           "\" in ", dtype_name(options.dtype),
           ": gradients are summed over the ranks that share a sample in the "
           "dtype of training; leave the key out");
}

// --- Plain models ----------------------------------------------------------------

/// Trains as `dp` ranks that divide before they sum: each has the gradients of
/// its own mean loss. Rank r has the samples r, r + dp, r + 2 dp, ...
ReferenceRun train_mean_of_replicas(const Options& options,
                                    std::int64_t num_pieces, int dp,
                                    const LossScaleOptions& loss_scale) {
  const auto strided = strided_micro_batches(options.batch, num_pieces);
  std::vector<MicroBatch> pieces;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(dp); ++rank) {
    for (std::size_t i = rank; i < strided.size();
         i += static_cast<std::size_t>(dp)) {
      pieces.push_back(strided[i]);
    }
  }
  const DynamicLossScaler scaler(loss_scale);
  OneDevice one;
  one.scaler = &scaler;
  one.replicas = dp;
  one.averages_replicas = true;
  return train_one_device(options, pieces, one);
}

void choose_data_parallel(const Options& options, DeepSpeedConfig config,
                          Choice& choice) {
  const int stage = config.zero.stage;
  choice.name = stage == 0 ? "DDP" : "ZeRO-" + std::to_string(stage);
  choice.chapter = stage == 0 ? "02_ddp" : "03_zero_fsdp";
  choice.topology = Topology({"dp"}, {options.world_size});
  SB_CHECK(!model_config(options).is_image() || choice.dp == 1, "--model ",
           options.model, ": ", kBatchNormDiffers);
  SB_CHECK(!model_config(options).is_image() || stage == 0, "--model ",
           options.model, ", /zero_optimization/stage ", stage,
           ": this chapter's bill knows language models only; give stage 0");
  config.batch = choice.sizes;
  // The config's clip, or --clip
  config.gradient_clipping = options.clip;
  if (stage == 2 && config.zero.offload_optimizer) {
    choice.fold_class = each_rank;
  }
  choice.make = [config](const Options& options, DeviceMesh& mesh) {
    return std::make_unique<ModuleStrategy>(options, config, mesh.group("dp"));
  };
  const int dp = choice.dp;
  const std::int64_t pieces = dp * choice.sizes.accumulation;
  choice.reference = [=](const Options& options) {
    // In f16 the single device also scales its loss and skips the same steps
    if (options.dtype == DType::kF16 && config.divides_first()) {
      return train_mean_of_replicas(options, pieces, dp, config.loss_scale());
    }
    // The scale grows by the ratio of the ranks' sum to their mean
    if (options.dtype == DType::kF16) {
      const double sum_over_mean = dp / config.gradient_predivide_factor;
      LossScaleOptions scale = config.loss_scale();
      scale.scale *= sum_over_mean;
      scale.min_scale *= sum_over_mean;
      return single_device::train_plain(options, pieces, scale);
    }
    const bool in_pieces = model_config(options).is_image();
    return train_one_device(options, in_pieces ? pieces : 1);
  };
}

void choose_fsdp(const Options& options, const DeepSpeedConfig& config,
                 Choice& choice) {
  choice.name = config.book.sharding == "fsdp" ? "FSDP" : "FSDP2";
  choice.chapter = "03_zero_fsdp";
  choice.topology = Topology({"dp"}, {options.world_size});
  refuse_reduction_keys(config, choice.name, /*has_offload=*/true);
  refuse_fp16(config, choice.name);
  refuse_image_models(options, kBatchNormDiffers);
  const bool is_offloaded = config.zero.offload_parameters;
  SB_CHECK(is_offloaded || !config.zero.offload_optimizer, config.label,
           ": /zero_optimization/offload_optimizer with FSDP: shards and "
           "optimizer move together; give "
           "/zero_optimization/offload_param as well");
  zero_fsdp::StrategyOptions setup;
  setup.strategy = config.book.sharding;
  setup.micro_batches = choice.sizes.accumulation;
  setup.cpu_offload = is_offloaded;
  SB_CHECK(config.recompute() != "attention", config.label,
           ": /shardbook/recompute \"attention\" with FSDP, which runs whole "
           "blocks again; give \"blocks\"");
  setup.recompute = config.recompute() == "blocks";
  choice.fold_class = zero_fsdp::fold_class(options, setup);
  choice.make = under_engine(
      config, choice.sizes, [=](const Options& options, DeviceMesh& mesh) {
        return std::make_unique<zero_fsdp::ZeroFsdpStrategy>(options, setup,
                                                             mesh.group("dp"));
      });
  choice.reference = [](const Options& options) {
    return train_one_device(options);
  };
}

// --- Models whose layers are replaced or cut -------------------------------------

void choose_experts(const Options& options, const DeepSpeedConfig& config,
                    Choice& choice) {
  const BookConfig& book = config.book;
  choice.name = "experts";
  choice.chapter = "13_moe";
  refuse_reduction_keys(config, choice.name, /*has_offload=*/true);
  refuse_recompute(config, choice.name);
  SB_CHECK(book.tensor_parallel_mode == "1d", config.label,
           ": /shardbook/experts with /shardbook/tensor_parallel mode \"",
           book.tensor_parallel_mode, "\": experts go with 1d");
  moe::StrategyOptions setup;
  setup.ep = book.ep_size;
  setup.tp = config.degrees.tp;
  setup.data_before_expert = book.use_data_before_expert_parallelism;
  setup.zero_stage = config.zero.stage;
  setup.cpu_offload = config.zero.offload_optimizer;
  setup.micro_batches = choice.sizes.accumulation;
  if (config.fp16.enabled) setup.loss_scale = config.loss_scale();
  setup.moe = book.moe;
  setup.moe.gate.num_experts = book.moe.num_experts.back();
  setup.moe.gate.noise =
      moe::noise_of(internal::lower_case(book.noisy_gate_policy));
  refuse_image_models(options, "experts take the place of a GPT's MLPs");
  moe::check_strategy_options(options, setup);
  choice.topology = moe::expert_topology(moe::group_sizes(options, setup));
  choice.fold_class = moe::fold_class(options, setup);
  choice.make = under_engine(
      config, choice.sizes, [=](const Options& options, DeviceMesh& mesh) {
        return std::make_unique<moe::MoeStrategy>(options, setup, mesh);
      });
  choice.reference = [=](const Options& options) {
    return moe::train_reference(options, setup);
  };
}

/// Tensor parallelism on squares and cubes, which are the whole world.
void choose_grid(const Options& options, const DeepSpeedConfig& config,
                 Choice& choice) {
  const BookConfig& book = config.book;
  const std::string& mode = book.tensor_parallel_mode;
  choice.name = mode + " tensor parallelism";
  refuse_reduction_keys(config, choice.name);
  refuse_fp16(config, choice.name);
  refuse_recompute(config, choice.name);
  const bool is_alone = config.zero.stage == 0 && choice.dp == 1 &&
                        config.degrees.pp == 1 && config.degrees.cp == 1 &&
                        !config.degrees.sequence_parallel;
  SB_CHECK(is_alone, config.label, ": /shardbook/tensor_parallel mode \"", mode,
           "\" with other kinds of parallelism, or a stage of ZeRO: its "
           "squares or cubes are all ranks; give it size ",
           options.world_size, " and nothing else");
  Passes passes;
  passes.micro_batches = choice.sizes.accumulation;
  choice.reference = [=](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };
  if (mode == "3d") {
    const int l = cube::side_of(options.world_size, "--world-size");
    choice.chapter = "10_tensor_parallel_3d";
    choice.topology = cube::cube_of(l);
    choice.make = under_engine(
        config, choice.sizes, [=](const Options& options, DeviceMesh& mesh) {
          return std::make_unique<cube::CubeStrategy>(
              options, cube::cube_on(mesh), mesh.world(), passes);
        });
    return;
  }
  const int depth = book.tensor_parallel_depth;
  const int q = summa::side_of(options.world_size, depth, "--world-size");
  choice.chapter =
      mode == "2d" ? "08_tensor_parallel_2d" : "09_tensor_parallel_2p5d";
  choice.topology =
      mode == "2d" ? summa::square(q) : tesseract::squares(q, depth);
  choice.make = under_engine(
      config, choice.sizes, [=](const Options& options, DeviceMesh& mesh) {
        return std::make_unique<summa::SummaStrategy>(
            options, summa::grid_of(mesh), mesh.world(), passes);
      });
}

void choose_hybrid(const Options& options, const DeepSpeedConfig& config,
                   Choice& choice) {
  const BookConfig& book = config.book;
  choice.name = "hybrid";
  choice.chapter = "14_hybrid_3d";
  refuse_reduction_keys(config, book.recompute == "attention"
                                    ? "/shardbook/recompute \"attention\""
                                    : "/pipeline/stages or parallel layers");
  hybrid::HybridOptions setup = config.degrees;
  setup.dp = choice.dp;
  setup.order = "deepspeed";
  setup.zero_stage = config.zero.stage;
  setup.micro_batches = choice.sizes.accumulation;
  setup.recompute =
      config.activation_checkpoint_interval > 0 ? "always" : config.recompute();
  setup.accumulate_f32 =
      sums_in_f32(config, options.dtype, choice.sizes.accumulation);
  const auto element = static_cast<std::int64_t>(dtype_bytes(options.dtype));
  setup.bucket_bytes =
      std::max<std::int64_t>(1, config.zero.reduce_bucket_size) * element;
  setup.loss_scale = config.loss_scale();
  setup.scaler = "";
  if (book.has_experts()) {
    const moe::MoeOptions& moe = book.moe;
    SB_CHECK(moe.num_experts.size() == 1 && !moe.use_residual &&
                 !book.use_data_before_expert_parallelism &&
                 moe.gate.drop_tokens && moe.gate.use_rts &&
                 moe.gate.min_capacity == moe::GateOptions().min_capacity,
             config.label,
             ": /shardbook/experts with stages or cut tokens: a list of "
             "num_experts, use_residual, min_capacity, drop_tokens, use_rts "
             "and use_data_before_expert_parallelism are chapter 13's alone; "
             "leave them out");
    setup.experts = moe.num_experts[0];
    setup.ep = std::max(book.ep_size, 1);
    setup.top_k = moe.gate.k;
    setup.capacity_factor = moe.gate.capacity_factor;
    setup.noise = internal::lower_case(book.noisy_gate_policy);
    setup.aux_coefficient = moe.aux_coefficient;
    setup.expert_tp = moe.expert_tensor_parallel;
  } else {
    setup.ep = std::max(book.ep_size, 1);
    SB_CHECK(setup.ep == 1 || model_config(options).llama.num_experts > 0,
             config.label, ": /shardbook/experts/ep_size ", setup.ep, ": ",
             options.model,
             " has no experts of its own; give num_experts as well");
  }
  hybrid::check_legal(options, setup);
  choice.topology = hybrid::topology_of(setup);
  choice.fold_class = hybrid::fold_class(options, setup);
  choice.make = under_engine(
      config, choice.sizes, [=](const Options& options, DeviceMesh& mesh) {
        return hybrid::make_strategy(options, setup, mesh);
      });
  choice.reference = [=](const Options& options) {
    return hybrid::reference_run(options, setup);
  };
}

}  // namespace

int data_parallel_ranks(const Options& options, const DeepSpeedConfig& config) {
  const int tp = config.degrees.tp, pp = config.degrees.pp,
            cp = config.degrees.cp;
  const std::int64_t shared = std::int64_t{tp} * cp * pp;
  SB_CHECK(options.world_size % shared == 0, "--world-size ",
           options.world_size, ": ", config.label, " has tensor parallelism ",
           tp, " x context parallelism ", cp, " x pipeline stages ", pp,
           "; give a multiple of ", shared);
  return static_cast<int>(options.world_size / shared);
}

Choice choose(const Options& options, const DeepSpeedConfig& config) {
  Choice choice;
  choice.dp = data_parallel_ranks(options, config);
  choice.clip = options.clip;
  BatchSizes given = config.batch;
  const bool is_option = given.train == 0 && given.micro == 0;
  if (is_option) given.train = options.batch;
  choice.sizes = resolve_batch(given, choice.dp,
                               is_option ? "--batch" : "train_batch_size");
  const BookConfig& book = config.book;
  const bool has_stages = config.degrees.pp > 1 || config.degrees.cp > 1 ||
                          config.degrees.sequence_parallel;
  const bool is_cut = has_stages || config.degrees.tp > 1;
  // The chapters on data parallelism recompute whole blocks, and sum whole
  // gradients in the dtype of training
  const bool sums_wider =
      sums_in_f32(config, options.dtype, choice.sizes.accumulation);
  const bool needs_hybrid =
      is_cut || (sums_wider && config.zero.stage <= 1) ||
      (!book.has_experts() && book.ep_size > 1) ||
      (book.recompute == "attention" && book.sharding == "zero");
  const bool has_experts = book.has_experts() && !has_stages;
  refuse_dtypes(options, config, sums_wider, needs_hybrid, has_experts);
  if (has_experts) {
    choose_experts(options, config, choice);
  } else if (book.tensor_parallel_mode != "1d") {
    choose_grid(options, config, choice);
  } else if (needs_hybrid) {
    SB_CHECK(book.sharding == "zero", config.label, ": /shardbook/sharding \"",
             book.sharding,
             "\" with stages or parallel layers: chapter 14 shards them by "
             "ZeRO; leave the key out");
    choose_hybrid(options, config, choice);
  } else if (book.sharding != "zero") {
    choose_fsdp(options, config, choice);
  } else {
    choose_data_parallel(options, config, choice);
  }
  return choice;
}

namespace {

/// Keys of ZeRO that were given and that the chosen library does not have.
std::string keys_without_effect(const Choice& choice,
                                const DeepSpeedConfig& config) {
  std::vector<std::string> others;
  if (choice.name != "ZeRO-3") {
    others = {"stage3_prefetch_bucket_size",
              "stage3_param_persistence_threshold",
              "stage3_max_live_parameters", "stage3_max_reuse_distance"};
  }
  if (choice.name.rfind("ZeRO-", 0) != 0) {
    others.insert(others.end(), {"sub_group_size", "allgather_partitions",
                                 "round_robin_gradients"});
  }
  const auto given = internal::leaf_values(config);
  const auto usual = internal::leaf_values(DeepSpeedConfig());
  std::vector<std::string> keys;
  for (const std::string& key : others) {
    const std::string path = "/zero_optimization/" + key;
    if (given.at(path) != usual.at(path)) keys.push_back(key);
  }
  return fmt::format("{}", fmt::join(keys, ", "));
}

}  // namespace

std::string describe(const Choice& choice, const DeepSpeedConfig& config) {
  const BatchSizes& sizes = choice.sizes;
  std::string text = config.label + ": " + choice.name + " of chapter " +
                     choice.chapter + "\n  " + how_many(sizes.train, "sample") +
                     " = micro-batches of " + std::to_string(sizes.micro) +
                     " x " + how_many(sizes.accumulation, "step") + " x " +
                     how_many(choice.dp, "data-parallel rank") + "\n";
  const bool is_overruled = choice.clip != config.gradient_clipping;
  for (const std::string& remark : config.remarks) {
    if (!is_overruled || remark != internal::kClippingRemark) {
      text += "  " + remark + "\n";
    }
  }
  if (is_overruled) {
    text += fmt::format("  gradient_clipping: {}, from --clip\n", choice.clip);
  }
  const std::string idle_keys = keys_without_effect(choice, config);
  if (!idle_keys.empty()) {
    text += "  " + idle_keys + ": without effect in " + choice.name + "\n";
  }
  return text;
}

}  // namespace shardbook::engine
