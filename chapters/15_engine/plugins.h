#pragma once

// How an Accelerator trains: one struct per library, with the fields of Hugging
// Face Accelerate's plugins.
//
//   AcceleratorOptions options;
//   options.plugin = DeepSpeedPlugin{/*zero_stage=*/2};
//
//   DistributedDataParallelPlugin     02_ddp: the default
//   FullyShardedDataParallelPlugin    03_zero_fsdp
//   DeepSpeedPlugin                   this chapter's engine: ZeRO, a config
//   MegatronLMPlugin                  14_hybrid_3d: tensor and pipeline
//                                     parallelism
//
// A field either has its effect, or `prepare` refuses its value with a reason.
//
// huggingface/accelerate, src/accelerate/utils/dataclasses.py.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "chapters/02_ddp/ddp.h"
#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/15_engine/deepspeed_config.h"

namespace shardbook::accelerate {

struct DistributedDataParallelPlugin {
  ddp::DdpOptions options = {};
};

struct FullyShardedDataParallelPlugin {
  /// 1: a unit's parameters end to end; 2: each cut by rows (fully_shard).
  int fsdp_version = 1;
  /// "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD" or "HYBRID_SHARD".
  std::string sharding_strategy = "FULL_SHARD";
  /// HYBRID_SHARD: ranks of a node, which hold one copy together.
  int shard_size = 0;
  /// "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP" or "NO_WRAP".
  std::string auto_wrap_policy = "TRANSFORMER_BASED_WRAP";
  /// TRANSFORMER_BASED_WRAP: types of modules that become units.
  std::vector<std::string> transformer_cls_names_to_wrap = {"GptBlock"};
  /// SIZE_BASED_WRAP: elements of a unit.
  std::int64_t min_num_params = 100'000'000;
  bool cpu_offload = false;
  /// "BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH".
  std::string backward_prefetch = "BACKWARD_PRE";
  /// The format of save_state. Only "SHARDED_STATE_DICT" is offered: any number
  /// of ranks loads it. get_state_dict has the whole model.
  std::string state_dict_type = "SHARDED_STATE_DICT";
  bool use_orig_params = false;
  bool sync_module_states = true;
  /// A block keeps its input only, and runs forward again.
  bool activation_checkpointing = false;
};

/// Fields that are not given follow the config, if there is one.
struct DeepSpeedPlugin {
  std::optional<int> zero_stage = {};            ///< without a config: 2
  std::optional<double> gradient_clipping = {};  ///< without a config: 1.0
  std::optional<std::string> offload_optimizer_device = {};  ///< "none", "cpu"
  std::optional<std::string> offload_param_device = {};
  /// Refused where true: the model exists before `prepare` is called.
  bool zero3_init_flag = false;
  /// A file, or a text that begins with '{'. Its values may be "auto".
  std::string hf_ds_config = {};
};

struct MegatronLMPlugin {
  int tp_degree = 1;
  int pp_degree = 1;
  std::int64_t num_micro_batches = 1;  ///< of each batch of a replica
  bool sequence_parallelism = false;
  bool recompute_activations = false;
  bool use_distributed_optimizer = false;  ///< ZeRO-1 over data-parallel ranks
};

using Plugin =
    std::variant<DistributedDataParallelPlugin, FullyShardedDataParallelPlugin,
                 DeepSpeedPlugin, MegatronLMPlugin>;

/// Values that `prepare` knows, for "auto" in a config.
struct KnownValues {
  std::int64_t micro_batch_size = 1;  ///< of one forward on one rank
  std::int64_t accumulation = 1;
  std::int64_t data_parallel_ranks = 1;
  std::string mixed_precision = "no";
  engine::OptimizerConfig optimizer = {};
  std::int64_t warmup_num_steps = 0;
  std::int64_t total_num_steps = 0;
  std::int64_t hidden_size = 0;  ///< 0: unknown
};

/// The options of the FSDP chapter. Throws Error that names the field, its
/// value and what is allowed.
fsdp::FsdpOptions fsdp_options(const FullyShardedDataParallelPlugin& plugin,
                               const std::string& mixed_precision,
                               int num_ranks);
/// The plugin's config, with each "auto" filled in from `known` where it can.
/// Throws Error that names field and key where they conflict.
engine::DeepSpeedConfig deepspeed_config(const DeepSpeedPlugin& plugin,
                                         const KnownValues& known);
/// The degrees of the hybrid chapter.
hybrid::HybridOptions hybrid_options(const MegatronLMPlugin& plugin,
                                     int world_size);

}  // namespace shardbook::accelerate
