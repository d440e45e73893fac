// From the fields of a plugin to the options of a chapter's library.

#include "chapters/15_engine/plugins.h"

#include <map>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/internal/config_rules.h"
#include "core/check.h"
#include "core/how_many.h"
#include "sim/json_object.h"

namespace shardbook::accelerate {
namespace {

using json_file::Json;
using Pointer = Json::json_pointer;

/// The choice that has this name.
template <typename Value>
Value choose(const std::string& field, const std::string& name,
             const std::map<std::string, Value>& choices) {
  const auto found = choices.find(name);
  std::string names;
  for (const auto& [each, value] : choices) {
    names += (names.empty() ? "" : ", ") + each;
  }
  SB_CHECK(found != choices.end(), field, " ", name, ": give one of ", names);
  return found->second;
}

}  // namespace

// --- FSDP --------------------------------------------------------------------

fsdp::FsdpOptions fsdp_options(const FullyShardedDataParallelPlugin& plugin,
                               const std::string& mixed_precision,
                               int num_ranks) {
  using fsdp::BackwardPrefetch;
  using fsdp::ShardingStrategy;
  const std::string name = "FullyShardedDataParallelPlugin: ";
  fsdp::FsdpOptions setup;
  SB_CHECK(plugin.fsdp_version == 1 || plugin.fsdp_version == 2, name,
           "fsdp_version ", plugin.fsdp_version, " is unknown; give 1 or 2");
  setup.per_parameter = plugin.fsdp_version == 2;
  setup.sharding_strategy = choose<ShardingStrategy>(
      name + "sharding_strategy", plugin.sharding_strategy,
      {{"FULL_SHARD", ShardingStrategy::kFullShard},
       {"SHARD_GRAD_OP", ShardingStrategy::kShardGradOp},
       {"NO_SHARD", ShardingStrategy::kNoShard},
       {"HYBRID_SHARD", ShardingStrategy::kHybridShard}});
  const bool is_hybrid =
      setup.sharding_strategy == ShardingStrategy::kHybridShard;
  SB_CHECK(is_hybrid == (plugin.shard_size > 0), name, "shard_size ",
           plugin.shard_size, " with sharding_strategy ",
           plugin.sharding_strategy,
           is_hybrid ? ": give the number of ranks of a node"
                     : ": only HYBRID_SHARD has nodes; leave it out");
  SB_CHECK(!is_hybrid || num_ranks % plugin.shard_size == 0, name,
           "shard_size ", plugin.shard_size, ": does not divide ",
           how_many(num_ranks, "rank"), "; give a divisor");
  setup.shard_size = plugin.shard_size;

  const auto wraps = choose<fsdp::WrapPolicy>(
      name + "auto_wrap_policy", plugin.auto_wrap_policy,
      {{"NO_WRAP", nullptr},
       {"SIZE_BASED_WRAP",
        // GPT's output uses the embedding once more, so it stays with the root
        fsdp::size_based_auto_wrap_policy(plugin.min_num_params,
                                          {"GptAttention"}, {"Embedding"})},
       {"TRANSFORMER_BASED_WRAP",
        fsdp::transformer_auto_wrap_policy(
            {plugin.transformer_cls_names_to_wrap.begin(),
             plugin.transformer_cls_names_to_wrap.end()})}});
  setup.auto_wrap_policy = wraps;
  setup.cpu_offload.offload_params = plugin.cpu_offload;
  setup.backward_prefetch = choose<BackwardPrefetch>(
      name + "backward_prefetch", plugin.backward_prefetch,
      {{"BACKWARD_PRE", BackwardPrefetch::kPre},
       {"BACKWARD_POST", BackwardPrefetch::kPost},
       {"NO_PREFETCH", BackwardPrefetch::kNone}});
  SB_CHECK(plugin.state_dict_type == "SHARDED_STATE_DICT", name,
           "state_dict_type ", plugin.state_dict_type,
           ": save_state writes every rank's own part, which any number of "
           "ranks can load; give SHARDED_STATE_DICT, and get_state_dict for "
           "the whole model");
  setup.use_orig_params = plugin.use_orig_params;
  setup.sync_module_states = plugin.sync_module_states;
  if (mixed_precision != "no") {
    const DType dtype = engine::dtype_of(mixed_precision);
    setup.mixed_precision = {dtype, dtype, dtype};
  }
  return setup;
}

// --- DeepSpeed ---------------------------------------------------------------

namespace {

/// A config that the script's values are filled into.
class Filler {
 public:
  Filler(const std::string& file, engine::AutoValues autos)
      : autos_(std::move(autos)) {
    for (auto& [path, value] : autos_) value.source = "the script";
    if (file.empty()) return;
    const auto [text, label] = engine::internal::config_text(
        file, "DeepSpeedPlugin: hf_ds_config", label_);
    label_ = label;
    json_ = json_file::parse_json(json_file::plain_json(text), label_);
    SB_CHECK(json_.is_object(), label_,
             ": is no object; give one with DeepSpeed's keys");
  }

  bool has(const std::string& path) const {
    const Pointer at(path);
    return json_.contains(at) && json_[at] != "auto";
  }
  /// In place of "auto" only.
  void fill(const std::string& path, const Json& value) {
    autos_[path] = {value.dump(), "the script"};
  }
  /// In place of "auto" or nothing; another value is an error.
  void say(const std::string& path, const Json& value,
           const std::string& source) {
    const Pointer at(path);
    SB_CHECK(!has(path) || json_[at] == value, label_, ": ", path, " ",
             json_file::printable(json_[at]), ", but ", source, " is ",
             json_file::printable(value),
             "; give one value, or \"auto\" in the file");
    check_sections(path);
    json_[at] = value;
  }
  engine::DeepSpeedConfig parsed() const {
    const auto filled = engine::fill_auto(json_.dump(), label_, autos_);
    auto config = engine::DeepSpeedConfig::parse(filled.text, label_);
    config.remarks.insert(config.remarks.begin(), filled.remarks.begin(),
                          filled.remarks.end());
    return config;
  }

 private:
  /// A value of the file that should have been an object has no keys.
  void check_sections(const std::string& path) const {
    for (Pointer section = Pointer(path).parent_pointer(); !section.empty();
         section = section.parent_pointer()) {
      if (!json_.contains(section)) continue;
      SB_CHECK(json_[section].is_object(), label_, ": ", section.to_string(),
               " ", json_file::printable(json_[section]),
               " is not allowed; give an object");
    }
  }

  std::string label_ = "hf_ds_config";
  Json json_ = Json::object();
  engine::AutoValues autos_;
};

void say_sizes(Filler& config, const KnownValues& known) {
  const std::int64_t micro = known.micro_batch_size, g = known.accumulation;
  config.say("/train_micro_batch_size_per_gpu", micro,
             "the batch of the loader on a rank");
  config.say("/gradient_accumulation_steps", g,
             "Accelerator's gradient_accumulation_steps");
  config.say("/train_batch_size", micro * g * known.data_parallel_ranks,
             "batch of the loader x gradient_accumulation_steps x "
             "data-parallel ranks");
}

void say_fields(Filler& config, const DeepSpeedPlugin& plugin,
                bool has_config) {
  const std::string name = "DeepSpeedPlugin's ";
  if (plugin.zero_stage || !has_config) {
    config.say("/zero_optimization/stage", plugin.zero_stage.value_or(2),
               name + "zero_stage");
  }
  if (plugin.gradient_clipping) {
    config.say("/gradient_clipping", *plugin.gradient_clipping,
               name + "gradient_clipping");
  }
  config.fill("/gradient_clipping", 1.0);
  const auto offload = [&](const std::optional<std::string>& device,
                           const std::string& key, const std::string& field) {
    if (!device) return config.fill(key, "none");
    SB_CHECK(*device == "none" || *device == "cpu", name, field, " ", *device,
             ": give none or cpu; nvme is not offered");
    config.say(key, *device, name + field);
  };
  offload(plugin.offload_optimizer_device,
          "/zero_optimization/offload_optimizer/device",
          "offload_optimizer_device");
  offload(plugin.offload_param_device,
          "/zero_optimization/offload_param/device", "offload_param_device");
}

void fill_objects(Filler& config, const KnownValues& known) {
  const std::string schedule = "/scheduler/params/";
  config.fill(schedule + "warmup_min_lr", 0);
  if (known.total_num_steps > 0) {
    config.fill(schedule + "warmup_num_steps", known.warmup_num_steps);
    config.fill(schedule + "total_num_steps", known.total_num_steps);
  }
  for (const std::string type : {"bf16", "fp16"}) {
    const std::string key = "/" + type + "/enabled";
    if (known.mixed_precision == type) {
      config.say(key, true, "Accelerator's mixed_precision " + type);
    }
    config.fill(key, false);
  }
}

}  // namespace

engine::DeepSpeedConfig deepspeed_config(const DeepSpeedPlugin& plugin,
                                         const KnownValues& known) {
  SB_CHECK(!plugin.zero3_init_flag,
           "DeepSpeedPlugin: zero3_init_flag true: prepare is given a model "
           "that exists; build it on the host (RankContext::host), from which "
           "stage 3 takes its shards one by one, and leave the flag out");
  Filler config(
      plugin.hf_ds_config,
      engine::internal::auto_values(known.optimizer.params, known.hidden_size));
  say_sizes(config, known);
  say_fields(config, plugin, !plugin.hf_ds_config.empty());
  fill_objects(config, known);
  return config.parsed();
}

// --- Megatron-LM -------------------------------------------------------------

hybrid::HybridOptions hybrid_options(const MegatronLMPlugin& plugin,
                                     int world_size) {
  const std::string name = "MegatronLMPlugin: ";
  SB_CHECK(plugin.tp_degree >= 1 && plugin.pp_degree >= 1, name, "tp_degree ",
           plugin.tp_degree, ", pp_degree ", plugin.pp_degree,
           ": give 1 or more");
  SB_CHECK(plugin.num_micro_batches >= 1, name, "num_micro_batches ",
           plugin.num_micro_batches, ": give 1 or more");
  const std::int64_t shared = std::int64_t{plugin.tp_degree} * plugin.pp_degree;
  SB_CHECK(world_size % shared == 0, name, "tp_degree ", plugin.tp_degree,
           " x pp_degree ", plugin.pp_degree, " share a model: ", shared,
           " does not divide ", how_many(world_size, "rank"),
           "; give degrees whose product does");
  SB_CHECK(!plugin.sequence_parallelism || plugin.tp_degree > 1, name,
           "sequence_parallelism true with tp_degree 1: tokens are cut among "
           "the ranks that share layers; give tp_degree 2 or more");
  return {.dp = static_cast<int>(world_size / shared),
          .tp = plugin.tp_degree,
          .pp = plugin.pp_degree,
          .order = "megatron",
          .zero_stage = plugin.use_distributed_optimizer ? 1 : 0,
          .sequence_parallel = plugin.sequence_parallelism,
          .micro_batches = plugin.num_micro_batches,
          .recompute = plugin.recompute_activations ? "always" : "never"};
}

}  // namespace shardbook::accelerate
