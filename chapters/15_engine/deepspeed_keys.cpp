// The table of keys in DeepSpeed's config classes (0.19) and older versions,
// and which of them act here.

#include "chapters/15_engine/internal/deepspeed_keys.h"

#include "chapters/common/run/command_line.h"

namespace shardbook::engine::internal {
namespace {

constexpr Effect kActs = Effect::kActs, kNone = Effect::kNone,
                 kChanges = Effect::kChanges, kInside = Effect::kInside;

// clang-format off
const std::vector<KnownKeys> kTable = {
// section, keys, effect, harmless value, why (of keys that act: why --resume does
// not compare them; the others are compared by their paths)

// --- The file itself ---------------------------------------------------------
{"", "train_batch_size", kActs, "", "it is --batch"},
{"", "train_micro_batch_size_per_gpu gradient_accumulation_steps", kActs, "", may_differ::kSums},
{"", "steps_per_print wall_clock_breakdown", kActs, "", may_differ::kOutput},
{"", "optimizer scheduler", kActs, "", ""},
{"", "gradient_clipping", kActs, "", "it is --clip"},
{"", "prescale_gradients gradient_predivide_factor", kActs, "", ""},
{"", "communication_data_type seq_parallel_communication_data_type", kActs, "null", ""},
{"", "bf16 bfloat16 fp16 data_types", kActs, "", ""},
{"", "zero_optimization allgather_size", kActs, "", ""},
{"", "pipeline tensor_parallel sequence_parallel_size", kActs, "", ""},
{"", "use_data_before_expert_parallelism activation_checkpointing", kActs, "", ""},
{"", "shardbook", kActs, "", ""},

{"", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", kNone, "",
 "every optimizer of the book goes with every stage, on the host as well"},
{"", "disable_allgather", kNone, "",
 "DeepSpeed's own stages ignore it, too"},
{"", "dump_state memory_breakdown log_level vocabulary_size", kNone, "",
 "it is about DeepSpeed's log"},
{"", "tensorboard wandb csv_monitor comet monitor_config", kNone, "",
 "the program's --log writes the losses"},
{"", "flops_profiler comms_logger comms_config timers", kNone, "",
 "the report has bytes and times, and --trace each call"},
{"", "autotuning", kNone, "",
 "the planner (./shardbook plan) searches, a run does not"},
{"", "aio nebula datastates_ckpt checkpoint", kNone, "",
 "it is about DeepSpeed's files; --checkpoint writes the book's"},
{"", "compile graph_harvesting", kNone, "",
 "it is about speed; the book compiles no graphs"},
{"", "hybrid_engine", kNone, "",
 "it generates text between training steps, and the book only trains"},
{"", "dataloader_drop_last", kNone, "",
 "the book's data has as many samples as the steps need"},
{"", "cuda_visible_devices local_rank", kNone, "",
 "--device and --world-size say where ranks run"},

{"", "gradient_allreduce_op", kChanges, R"("mean")",
 "a sum would be as many times larger as there are ranks"},
{"", "managed_gradient_accumulation", kChanges, "true",
 "the script would have to count micro-steps; here the engine does"},
{"", "fp32_allreduce", kChanges, "false",
 "it is the old name of a choice; give /communication_data_type \"fp32\""},
{"", "sparse_gradients", kChanges, "false",
 "gradients of embeddings are dense here, and their sums are rounded otherwise"},
{"", "amp torch_autocast", kChanges, "off",
 "operators would choose their dtypes one by one; give /bf16 or /fp16"},
{"", "compression_training quantize_training eigenvalue", kChanges, "off",
 "compressed weights give other losses"},
{"", "weight_quantization", kChanges, "null",
 "compressed weights give other losses"},
{"", "sparse_attention", kChanges, "null",
 "attention over some of the tokens gives other losses"},
{"", "progressive_layer_drop", kChanges, "off",
 "layers that are left out give other losses"},
{"", "curriculum_learning data_efficiency", kChanges, "off",
 "other samples, or other lengths, give other losses"},
{"", "elasticity", kChanges, "off",
 "it takes the batch from the number of GPUs; give /train_batch_size"},
{"", "expert_parallel", kChanges, "off",
 "it replaces layers of Hugging Face models; give /shardbook/experts"},

// --- Optimizer and schedule --------------------------------------------------
{"/optimizer", "type", kActs, "", "it is --optimizer"},
{"/optimizer", "params", kActs, "", ""},
{"/optimizer", "legacy_fusion", kNone, "", "it is about speed"},
{"/optimizer/params", "lr weight_decay betas eps adam_w_mode momentum nesterov", kActs, "",
 "they are --lr, --weight-decay, --beta1 and so on"},
{"/optimizer/params", "dampening", kActs, "", ""},
{"/optimizer/params", "torch_adam set_grad_none foreach fused capturable differentiable", kNone, "",
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
{"/optimizer/params", "maximize", kChanges, "false", "the loss would grow"},
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
{"/bf16", "enabled", kActs, "", "it is --dtype"},
{"/bf16", "immediate_grad_update check_grad_overflow", kNone, "",
 "bf16 has the range of f32, and gradients are summed in either order"},
{"/bf16", "bf16_master_weights_and_grads bf16_optimizer_states", kChanges, "false",
 "weights or moments in 16 bits give other losses"},
{"/fp16", "enabled", kActs, "", "it is --dtype"},
{"/fp16", "loss_scale initial_scale_power loss_scale_window hysteresis", kActs, "",
 "they are --loss-scale, --loss-scale-window and --hysteresis"},
{"/fp16", "auto_cast consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads", kActs, "", ""},
{"/data_types", "grad_accum_dtype", kActs, "null", "it is --accumulate-f32"},
{"/data_types", "param_dtype", kActs, "null", "it is --dtype"},
{"/data_types", "buffer_dtype", kChanges, "null",
 "buffers have the dtype of the model"},

// --- ZeRO. Names without stage3_ are the same keys -----------------------------
{"/zero_optimization", "stage allgather_partitions allgather_bucket_size reduce_scatter reduce_bucket_size "
 "contiguous_gradients sub_group_size round_robin_gradients", kActs, "", may_differ::kSums},
{"/zero_optimization", "overlap_comm offload_optimizer offload_param cpu_offload cpu_offload_param", kActs, "null",
 may_differ::kPlace},
{"/zero_optimization", "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters "
 "stage3_max_reuse_distance prefetch_bucket_size param_persistence_threshold max_live_parameters "
 "max_reuse_distance", kActs, "", may_differ::kPlace},
{"/zero_optimization", "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
 "stage3_gather_fp16_weights_on_model_save gather_fp16_weights_on_model_save load_from_fp32_weights "
 "elastic_checkpoint pipeline_loading_checkpoint", kNone, "",
 "--save writes the whole model, and a checkpoint loads on any number of ranks"},
{"/zero_optimization", "cpu_offload_use_pin_memory", kNone, "",
 "beside a GPU the host's memory is pinned with or without it"},
{"/zero_optimization", "use_multi_rank_bucket_allreduce stage3_use_all_reduce_for_fetch_params "
 "use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential", kNone, "",
 "other calls bring the same numbers"},
{"/zero_optimization", "stage3_model_persistence_threshold model_persistence_threshold "
 "stage3_module_granularity_threshold module_granularity_threshold leaf_module", kNone, "",
 "blocks are gathered as a whole, and small parameters stay by their own threshold"},
{"/zero_optimization", "zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather", kNone, "",
 "parameters are cut over all ranks; a second cut inside a node changes the traffic alone"},
{"/zero_optimization", "legacy_stage1 ignore_unused_parameters memory_efficient_linear override_module_apply "
 "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory", kNone, "",
 "it is about DeepSpeed's own code"},
{"/zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
 kChanges, "false", "what travels in 8 or 4 bits gives other losses"},
{"/zero_optimization", "zeropp_loco_param", kChanges, "null",
 "what travels in 8 or 4 bits gives other losses"},
{"/zero_optimization", "zenflow", kChanges, "null",
 "updates that come later give other losses"},
{"/zero_optimization/leaf_module", "classes names name_suffixes", kInside, "", ""},
{"/zero_optimization/offload_optimizer", "device pin_memory", kActs, "", may_differ::kPlace},
{"/zero_optimization/offload_optimizer", "nvme_path buffer_count pipeline pipeline_read pipeline_write fast_init",
 kNone, "", "it is about files on NVMe, which are not offered"},
{"/zero_optimization/offload_optimizer", "ratio super_offload cpuadam_cores_perc", kNone, "",
 "all of the optimizer is on the host, on all of its cores"},
{"/zero_optimization/offload_param", "device pin_memory", kActs, "", may_differ::kPlace},
{"/zero_optimization/offload_param", "nvme_path buffer_count buffer_size max_in_cpu", kNone, "",
 "it is about files on NVMe, which are not offered"},

// --- Parallelism, and activations ----------------------------------------------
{"/pipeline", "stages partition activation_checkpoint_interval", kActs, "", may_differ::kRanks},
{"/pipeline", "seed_layers pipe_partitioned grad_partitioned use_reentrant", kNone, "",
 "layers have one seed, and activations travel whole"},
{"/tensor_parallel", "autotp_size", kActs, "", may_differ::kRanks},
{"/tensor_parallel", "dtype tp_overlap_comm tp_grain_size tp tensor_parallel injection_policy_tuple "
 "partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject", kNone, "",
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

// --- Inside sections without effect: names alone ---------------------------------
{"/tensorboard", "enabled output_path job_name", kInside, "", ""},
{"/wandb", "enabled group team project", kInside, "", ""},
{"/csv_monitor", "enabled output_path job_name", kInside, "", ""},
{"/comet", "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
 kInside, "", ""},
{"/flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
 kInside, "", ""},
{"/comms_logger", "enabled prof_all prof_ops verbose debug", kInside, "", ""},
{"/timers", "throughput", kInside, "", ""},
{"/autotuning", "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
 "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
 "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
 "model_info model_info_path", kInside, "", ""},
{"/aio", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
 kInside, "", ""},
{"/nebula", "enabled enable_nebula_load load_path nebula_load_path persistent_storage_path "
 "persistent_time_interval num_of_version_in_retention", kInside, "", ""},
{"/checkpoint", "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization "
 "writer", kInside, "", ""},
{"/compile", "enabled disable backend kwargs deepcompile free_activation free_activation_threshold offload_activation "
 "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
 "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
 "keep_all_input_tensors passes", kInside, "", ""},
{"/hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
 "tp_gather_partition_size enable_cuda_graph", kInside, "", ""},
{"/elasticity", "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node "
 "model_parallel_size min_time prefer_larger_batch ignore_non_elastic_batch_info version", kInside, "", ""},
{"/amp", "enabled opt_level", kInside, "", ""},
{"/torch_autocast", "enabled dtype lower_precision_safe_modules", kInside, "", ""},
{"/progressive_layer_drop", "enabled theta gamma", kInside, "", ""},
};
// clang-format on

}  // namespace

const std::vector<KnownKeys>& known_keys() { return kTable; }

}  // namespace shardbook::engine::internal
