// The table of keys in DeepSpeed's config classes (0.19.8), of older keys that
// files still have, and which of them act here.

#include "chapters/15_engine/internal/deepspeed_keys.h"

#include <sstream>

#include "chapters/common/run/command_line.h"

namespace shardbook::engine::internal {
namespace {

constexpr Effect kActs = Effect::kActs, kNone = Effect::kNone,
                 kChanges = Effect::kChanges, kInside = Effect::kInside,
                 kGone = Effect::kGone;

// clang-format off
const std::vector<KnownKeys> kTable = {
// section, keys, effect, harmless value, why (of keys that act: why --resume does
// not compare them; the others are compared by their paths)

// --- The file itself ---------------------------------------------------------
{"", "train_batch_size", kActs, "null", "it is --batch"},
{"", "train_micro_batch_size_per_gpu gradient_accumulation_steps", kActs, "null", may_differ::kSums},
{"", "steps_per_print", kActs, "null", may_differ::kOutput},
{"", "wall_clock_breakdown", kActs, "", may_differ::kOutput},
{"", "optimizer scheduler", kActs, "", ""},
{"", "gradient_clipping", kActs, "", "it is --clip"},
{"", "prescale_gradients gradient_predivide_factor", kActs, "", ""},
{"", "zero_allow_untested_optimizer", kActs, "", "it allows runs, and changes none"},
{"", "communication_data_type seq_parallel_communication_data_type bf16", kActs, "null", ""},
{"", "bfloat16 fp16 data_types", kActs, "", ""},
{"", "zero_optimization allgather_size", kActs, "", ""},
{"", "pipeline tensor_parallel sequence_parallel_size", kActs, "", ""},
{"", "use_data_before_expert_parallelism activation_checkpointing", kActs, "", ""},
{"", "shardbook", kActs, "", ""},

{"", "zero_force_ds_cpu_optimizer", kNone, "",
 "every optimizer of the book also runs on the host"},
{"", "disable_allgather", kNone, "",
 "DeepSpeed's own stages ignore it, too"},
{"", "dump_state memory_breakdown log_level:debug|info|warning|error|critical? vocabulary_size", kNone, "",
 "it is about DeepSpeed's log"},
{"", "tensorboard:o wandb:o csv_monitor:o comet:o monitor_config", kNone, "",
 "the program's --log writes the losses"},
{"", "flops_profiler:o comms_logger:o comms_config timers:o", kNone, "",
 "the report has bytes and times, and --trace each call"},
{"", "autotuning:o", kNone, "",
 "the planner (./shardbook plan) searches, a run does not"},
{"", "aio:o? datastates_ckpt checkpoint:o", kNone, "",
 "it is about DeepSpeed's files; --checkpoint writes the book's"},
{"", "compile:o", kNone, "",
 "it is about speed; the book compiles no graphs"},
{"", "hybrid_engine:o", kNone, "",
 "it generates text between training steps, and the book only trains"},
{"", "dataloader_drop_last", kNone, "",
 "the book's data has as many samples as the steps need"},
{"", "cuda_visible_devices local_rank", kNone, "",
 "--device and --world-size say where ranks run"},
{"", "disable_python_gc", kNone, "",
 "it is about Python's memory"},

{"", "gradient_allreduce_op", kChanges, R"("mean")",
 "a sum would be as many times larger as there are ranks"},
{"", "managed_gradient_accumulation", kChanges, "true",
 "the script would have to count micro-steps; here the engine does"},
{"", "fp32_allreduce", kChanges, "false",
 "it is the old name of a choice; give /communication_data_type \"fp32\""},
{"", "torch_autocast", kChanges, "off",
 "operators would choose their dtypes one by one; give /bf16 or /fp16"},
{"", "weight_quantization", kChanges, "off",
 "compressed weights give other losses"},
{"", "data_efficiency", kChanges, "off",
 "other samples, or other lengths, give other losses"},
{"", "expert_parallel", kChanges, "off",
 "it replaces layers of Hugging Face models; give /shardbook/experts"},

{"", "amp", kGone, "", "Apex is gone; give /bf16 or /fp16"},
{"", "compression_training quantize_training eigenvalue sparse_attention progressive_layer_drop "
 "graph_harvesting nebula", kGone, "", "what it configured is gone; leave it out"},
{"", "sparse_gradients", kGone, "", "gradients of embeddings are dense; leave it out"},
{"", "curriculum_learning", kGone, "", "it is in /data_efficiency/data_sampling; leave it out"},
{"", "elasticity", kGone, "", "the file says how large a batch is; give /train_batch_size"},

// --- Optimizer and schedule --------------------------------------------------
{"/optimizer", "type", kActs, "", "it is --optimizer"},
{"/optimizer", "params", kActs, "null", ""},
{"/optimizer", "legacy_fusion", kNone, "", "it is about speed"},
{"/optimizer/params", "lr weight_decay betas eps adam_w_mode torch_adam momentum nesterov", kActs, "",
 "they are --lr, --weight-decay, --beta1 and so on"},
{"/optimizer/params", "dampening", kActs, "", ""},
{"/optimizer/params", "set_grad_none foreach fused capturable", kNone, "",
 "it chooses among programs for the same update"},
{"/optimizer/params", "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
 "local_step_clipper max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold eps_inside_sqrt", kNone, "",
 "it is for LAMB and the 1-bit optimizers"},
{"/optimizer/params", "max_grad_norm", kChanges, "",
 "gradients are clipped by the engine, not by the optimizer; give /gradient_clipping in place of it"},
{"/optimizer/params", "amsgrad", kChanges, "false",
 "leaving the key out changes the numbers: steps are then divided by the second moment, not by its maximum so far"},
{"/optimizer/params", "bias_correction", kChanges, "true",
 "leaving the key out changes the numbers: moments are then divided by 1 - beta^step, as DeepSpeed's are without it"},
{"/optimizer/params", "differentiable", kChanges, "false",
 "PyTorch refuses to update weights that autograd records"},
{"/optimizer/params", "maximize", kChanges, "false", "the loss would grow"},
{"/optimizer/params", "decoupled_weight_decay", kChanges, "false",
 "it makes AdamW of Adam; give /optimizer/params/adam_w_mode true"},
{"/optimizer/params", "fp32_optimizer_states", kChanges, "true",
 "moments in 16 bits give other losses"},

{"/scheduler", "type params", kActs, "", ""},
{"/scheduler/params", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps", kActs, "", ""},
{"/scheduler/params", "last_batch_iteration", kChanges, "-1",
 "the schedule would begin in its middle; --resume goes on where a run ended"},
{"/scheduler/params", "warmup_min_ratio cos_min_ratio lr_range_test_min_lr lr_range_test_step_size "
 "lr_range_test_step_rate lr_range_test_staircase cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size "
 "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum "
 "cycle_min_mom cycle_max_mom decay_mom_rate", kNone, "",
 "it is for another type of scheduler"},

// --- Precision ---------------------------------------------------------------
{"/bf16", "enabled:b", kActs, "", "it is --dtype"},
{"/bf16", "immediate_grad_update:b check_grad_overflow:b", kNone, "",
 "bf16 has the range of f32, and gradients are summed in either order"},
{"/bf16", "bf16_master_weights_and_grads:b bf16_optimizer_states:b", kChanges, "false",
 "weights or moments in 16 bits give other losses"},
{"/fp16", "enabled:b", kActs, "", "it is --dtype"},
{"/fp16", "loss_scale:f! initial_scale_power:i loss_scale_window:i! hysteresis:i", kActs, "",
 "they are --loss-scale, --loss-scale-window and --hysteresis"},
{"/fp16", "auto_cast:b consecutive_hysteresis:b min_loss_scale:i! fp16_master_weights_and_grads:b", kActs, "", ""},
{"/data_types", "grad_accum_dtype", kActs, "null", "it is --accumulate-f32"},
{"/data_types", "param_dtype", kActs, "null", "it is --dtype"},
{"/data_types", "buffer_dtype", kChanges, "null",
 "buffers have the dtype of the model"},
{"/data_types", "keep_in_fp32_modules", kChanges, R"("auto")",
 "buffers have the dtype of the model"},

// --- ZeRO. Names without stage3_ are the same keys -----------------------------
{"/zero_optimization", "stage:i allgather_partitions:b allgather_bucket_size:n reduce_scatter:b reduce_bucket_size:p "
 "contiguous_gradients:b sub_group_size:n round_robin_gradients:b", kActs, "", may_differ::kSums},
{"/zero_optimization", "compute_grad_norm:b", kActs, "", may_differ::kOutput},
{"/zero_optimization", "overlap_comm:b? offload_optimizer:o? offload_param:o? cpu_offload:b? cpu_offload_param:b?", kActs,
 "", may_differ::kPlace},
{"/zero_optimization", "stage3_prefetch_bucket_size:n stage3_param_persistence_threshold:n "
 "stage3_max_live_parameters:n stage3_max_reuse_distance:n prefetch_bucket_size:n param_persistence_threshold:n "
 "max_live_parameters:n max_reuse_distance:n", kActs, "", may_differ::kPlace},
{"/zero_optimization", "stage3_gather_16bit_weights_on_model_save:b gather_16bit_weights_on_model_save:b "
 "stage3_gather_fp16_weights_on_model_save:b load_from_fp32_weights:b elastic_checkpoint:b "
 "pipeline_loading_checkpoint:b", kNone, "",
 "--save writes the whole model, and a checkpoint loads on any number of ranks"},
{"/zero_optimization", "cpu_offload_use_pin_memory:b?", kNone, "",
 "beside a GPU the host's memory is pinned with or without it"},
{"/zero_optimization", "use_multi_rank_bucket_allreduce:b stage3_use_all_reduce_for_fetch_params:b "
 "use_all_reduce_for_fetch_params:b stage3_allgather_sequential:b allgather_sequential:b", kNone, "",
 "other calls bring the same numbers"},
{"/zero_optimization", "stage3_model_persistence_threshold:n model_persistence_threshold:n "
 "stage3_module_granularity_threshold:i module_granularity_threshold:i leaf_module:o?", kNone, "",
 "blocks are gathered as a whole, and small parameters stay by their own threshold"},
{"/zero_optimization", "zero_hpz_partition_size:n", kNone, "",
 "parameters are cut over all ranks; a second cut inside a node changes the traffic alone"},
{"/zero_optimization", "parameter_alignment:b", kNone, "",
 "it pads DeepSpeed's buffers between parameters"},
{"/zero_optimization", "ignore_unused_parameters:b memory_efficient_linear:b override_module_apply:b "
 "log_trace_cache_warnings:b enable_sanity_checks:b save_muon_momentum_buffer_in_memory:b", kNone, "",
 "it is about DeepSpeed's own code"},
{"/zero_optimization", "legacy_stage1:b", kChanges, "false",
 "DeepSpeed 0.19.8 has one stage 1, and refuses to run the old one"},
{"/zero_optimization", "zero_quantized_weights:b zero_quantized_nontrainable_weights:b zero_quantized_gradients:b",
 kChanges, "false", "what travels in 8 or 4 bits gives other losses"},
{"/zero_optimization", "zenflow:o?", kChanges, "null",
 "updates that come later give other losses"},
{"/zero_optimization", "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param", kGone, "",
 "what it configured is gone; leave it out"},
{"/zero_optimization/leaf_module", "classes:t names:t name_suffixes:t", kInside, "", ""},
{"/zero_optimization/offload_optimizer", "device:s ratio:r", kActs, "", may_differ::kPlace},
{"/zero_optimization/offload_optimizer", "pin_memory:b", kNone, "",
 "beside a GPU the host's memory is pinned with or without it"},
{"/zero_optimization/offload_optimizer", "nvme_path:s? buffer_count:n pipeline_read:b pipeline_write:b fast_init:b",
 kNone, "", "it is about files on NVMe, which are not offered"},
{"/zero_optimization/offload_optimizer", "super_offload:b cpuadam_cores_perc:r", kNone, "",
 "all of the optimizer is on the host, on all of its cores"},
{"/zero_optimization/offload_optimizer", "pipeline", kGone, "", "pipeline_read and pipeline_write say it; leave it out"},
{"/zero_optimization/offload_param", "device:s", kActs, "", may_differ::kPlace},
{"/zero_optimization/offload_param", "pin_memory:b", kNone, "",
 "beside a GPU the host's memory is pinned with or without it"},
{"/zero_optimization/offload_param", "nvme_path:s? buffer_count:n buffer_size:n max_in_cpu:n", kNone, "",
 "it is about files on NVMe, which are not offered"},

// --- Parallelism, and activations ----------------------------------------------
{"/pipeline", "stages partition activation_checkpoint_interval", kActs, "", may_differ::kRanks},
{"/pipeline", "seed_layers pipe_partitioned grad_partitioned use_reentrant", kNone, "",
 "layers have one seed, and activations travel whole"},
{"/tensor_parallel", "autotp_size:i tp:o tensor_parallel:o", kActs, "", may_differ::kRanks},
{"/tensor_parallel", "tp_overlap_comm:b injection_policy_tuple:l? partition_config:o? preset_model:s? "
 "keep_module_on_host:b replace_with_kernel_inject:b kernel_inject:b vocab_parallel_lm_head:b? "
 "vocab_parallel_ce_backend:torch|liger", kNone, "",
 "the book's models know how they are cut"},
{"/tensor_parallel", "dtype:s", kChanges, "",
 "DeepSpeed 0.19.8 refuses every text, since none is a torch.dtype; leave it out"},
{"/tensor_parallel/tp", "tp_size:i", kActs, "", may_differ::kRanks},
{"/tensor_parallel/tp", "tp_grain_size:i mpu tp_group", kNone, "",
 "the book's models know how they are cut"},
{"/tensor_parallel/tensor_parallel", "tp_size:i", kActs, "", may_differ::kRanks},
{"/tensor_parallel/tensor_parallel", "tp_grain_size:i mpu tp_group", kNone, "",
 "the book's models know how they are cut"},
{"/activation_checkpointing", "partition_activations cpu_checkpointing contiguous_memory_optimization "
 "number_checkpoints", kActs, "", may_differ::kPlace},
{"/activation_checkpointing", "synchronize_checkpoint_boundary profile", kNone, "",
 "it is about measuring"},
{"/shardbook", "tensor_parallel context_parallel experts", kActs, "", ""},
{"/shardbook", "schedule chunks recompute sharding", kActs, "", may_differ::kSums},
{"/shardbook/tensor_parallel", "size mode depth sequence_parallel", kActs, "", may_differ::kRanks},
{"/shardbook/context_parallel", "size kind layout", kActs, "", may_differ::kRanks},
{"/shardbook/experts", "num_experts top_k capacity_factor min_capacity drop_tokens use_rts aux_coefficient use_residual",
 kActs, "", "they are the options of chapter 13: --num-experts, --top-k and so on"},
{"/shardbook/experts", "noisy_gate_policy", kActs, "null", "it is --noise"},
{"/shardbook/experts", "ep_size use_data_before_expert_parallelism enable_expert_tensor_parallelism", kActs, "",
 may_differ::kRanks},

// --- Inside sections without effect: names and types -----------------------------
{"/tensorboard", "enabled:b output_path:s job_name:s", kInside, "", ""},
{"/wandb", "enabled:b group:s? team:s? project:s", kInside, "", ""},
{"/csv_monitor", "enabled:b output_path:s job_name:s", kInside, "", ""},
{"/comet", "enabled:b samples_log_interval:i project:s? workspace:s? api_key:s? experiment_name:s? experiment_key:s? "
 "online:b? mode:s?", kInside, "", ""},
{"/flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
 kInside, "", ""},
{"/comms_logger", "enabled:b prof_all:b prof_ops:l verbose:b debug:b", kInside, "", ""},
{"/timers", "throughput:o", kInside, "", ""},
{"/timers/throughput", "enabled:b synchronized:b", kInside, "", ""},
{"/autotuning", "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
 "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
 "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
 "model_info model_info_path", kInside, "", ""},
{"/aio", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
 kInside, "", ""},
{"/checkpoint", "tag_validation:warn|ignore|fail load_universal use_node_local_storage parallel_write "
 "checkpoint_serialization writer", kInside, "", ""},
{"/compile", "deepcompile:b autoep_non_moe:b free_activation:b free_activation_threshold:i offload_activation:b "
 "offload_activation_pin_memory:b offload_opt_states:b double_buffer:b symmetric_memory:b debug_log:b "
 "offload_parameters:b sync_before_reduce:b sync_after_reduce:b sync_before_allgather:b sync_after_allgather:b "
 "keep_int_input_tensors:b keep_all_input_tensors:b passes:l?", kInside, "", ""},
{"/compile", "enabled disable backend kwargs", kGone, "", "the script calls engine.compile; leave it out"},
{"/hybrid_engine", "enabled:b max_out_tokens:p inference_tp_size:i release_inference_cache:b pin_parameters:b "
 "tp_gather_partition_size:i enable_cuda_graph:b", kInside, "", ""},
{"/torch_autocast", "enabled dtype lower_precision_safe_modules", kInside, "", ""},
{"/weight_quantization", "enabled:b num_bits:i post_init_quant:o q_groups:i q_type quantized_initialization:o",
 kInside, "", ""},
};
// clang-format on

}  // namespace

const std::vector<KnownKeys>& known_keys() { return kTable; }

std::vector<KnownKey> keys_of(const KnownKeys& row) {
  std::vector<KnownKey> keys;
  std::istringstream words(row.keys);
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    const bool has_type = colon != std::string::npos;
    keys.push_back(
        {word.substr(0, colon), has_type ? word.substr(colon + 1) : ""});
  }
  return keys;
}

}  // namespace shardbook::engine::internal
