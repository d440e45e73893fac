// The options of the program `accelerate`.

#include "chapters/15_engine/accelerate_script.h"

#include <algorithm>
#include <limits>

#include "chapters/02_ddp/sampler.h"
#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/strategies.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/run_identity.h"
#include "comm/launch.h"
#include "core/check.h"

namespace shardbook::accelerate {

// --- Options -----------------------------------------------------------------

namespace {

void add_plugin_fields(CommandLine& line, ScriptOptions& script) {
  using namespace may_differ;
  std::vector<std::string>* flags = nullptr;
  const auto begin = [&](const char* plugin, const char* name) {
    line.group(name);
    flags = &script.fields[plugin];
  };
  const auto field = [&](const char* flag, auto* value, const char* why_differ,
                         const char* help, auto... limits) {
    line.add({flag, why_differ}, value, help, limits...);
    flags->emplace_back(flag);
  };
  begin("fsdp", "FullyShardedDataParallelPlugin");
  FullyShardedDataParallelPlugin& fsdp = script.fsdp;
  field("--fsdp-version", &fsdp.fsdp_version, kPlace, "1 or 2");
  field("--sharding-strategy", &fsdp.sharding_strategy, kRanks,
        "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD");
  field("--shard-size", &fsdp.shard_size, kRanks,
        "of HYBRID_SHARD: ranks of a node");
  field("--auto-wrap-policy", &fsdp.auto_wrap_policy, kPlace,
        "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP");
  field("--min-num-params", &fsdp.min_num_params, kPlace, "of SIZE_BASED_WRAP");
  field("--fsdp-cpu-offload", &fsdp.cpu_offload, kPlace,
        "shards lie on the host");
  field("--fsdp-backward-prefetch", &fsdp.backward_prefetch, kPlace,
        "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH");
  field("--use-orig-params", &fsdp.use_orig_params, kPlace,
        "the optimizer sees the module's own parameters");
  field("--activation-checkpointing", &fsdp.activation_checkpointing, kPlace,
        "blocks run forward again in backward");
  begin("deepspeed", "DeepSpeedPlugin");
  DeepSpeedPlugin& deepspeed = script.deepspeed;
  field("--zero-stage", &deepspeed.zero_stage.emplace(2), kPlace,
        "stage of ZeRO", 0, 3);
  field("--offload-optimizer-device",
        &deepspeed.offload_optimizer_device.emplace("none"), kPlace,
        "none or cpu");
  field("--offload-param-device",
        &deepspeed.offload_param_device.emplace("none"), kPlace, "none or cpu");
  field("--hf-ds-config", &deepspeed.hf_ds_config,
        "its keys are compared one by one",
        "FILE.json with DeepSpeed's keys, or the text itself, {...}");
  begin("megatron", "MegatronLMPlugin");
  MegatronLMPlugin& megatron = script.megatron;
  field("--tp-degree", &megatron.tp_degree, kRanks, "ranks that share layers",
        1);
  field("--pp-degree", &megatron.pp_degree, kRanks, "stages of a pipeline", 1);
  field("--num-micro-batches", &megatron.num_micro_batches, kSums,
        "of each batch of a replica", 1);
  field("--sequence-parallelism", &megatron.sequence_parallelism, kSums,
        "norms and dropout are split over the tokens");
  field("--recompute-activations", &megatron.recompute_activations, kPlace,
        "stages run forward again in backward");
  field("--use-distributed-optimizer", &megatron.use_distributed_optimizer,
        kPlace, "ZeRO-1 over the replicas");
}

}  // namespace

void add_options(CommandLine& line, ScriptOptions& script) {
  Options& run = script.run;
  AcceleratorOptions& accelerator = script.accelerator;
  run.lr_schedule = "linear";
  line.group("Processes");
  line.add({"--world-size", may_differ::kRanks}, &run.world_size,
           "number of processes", 1, 1 << 16);
  line.add({"--backend", may_differ::kRanks}, &run.backend,
           "what the processes are", {"threads", "gloo", "nccl"},
           "the loop reads losses, which --backend sim does not have");
  line.add({"--device", may_differ::kSums}, &run.device, "where tensors live",
           {"cpu", "cuda"});
  accept_local_rank(line);
  line.group("Model and data");
  line.add({"--model", "its keys are compared, not its name"}, &run.model,
           "a GPT by name, or a config FILE.json");
  line.add("--dtype", &run.dtype, "element type of the model", {"f32", "f64"});
  line.add("--data", &run.data, "as of the chapters: book, walk, FILE, ...");
  line.add({"--data-format", "the tokens are compared, however they were read"},
           &run.data_format, "of FILE", {"auto", "bytes", "u16", "u32"});
  line.add("--seq", &run.seq, "tokens per sample", 1);
  line.add("--seed", &run.seed, "seed of weights and of the samples' order");
  line.add("--num-samples", &script.num_samples, "samples of an epoch", 1);
  line.add({"--eval-samples", may_differ::kOutput}, &script.eval_samples,
           "samples of the evaluation, behind the others", 1);
  line.group("Script");
  line.add({"--batch-size", "the samples of an update are compared"},
           &script.batch_size,
           "samples of a process; of all together with --split-batches", 1);
  line.add("--shuffle", &script.shuffle, "another order in each epoch");
  line.add("--drop-last", &script.drop_last, "leave out an unfinished round");
  line.add({"--num-train-epochs",
            "the updates are compared where rates depend on them"},
           &script.epochs, "epochs", 1);
  line.add("--max-train-steps", &script.max_train_steps,
           "stop after so many updates; 0: at the end of the last epoch")
      .compared_if([&run] { return run.lr_schedule != "constant"; });
  line.add("--optimizer", &run.optimizer, "how weights are updated",
           {"adamw", "adam", "sgd"});
  line.add("--lr", &run.optimizer_options.lr, "learning rate");
  line.add("--weight-decay", &run.optimizer_options.weight_decay,
           "as PyTorch's optimizers");
  line.add({"--lr-scheduler-type", "it is --lr-schedule"}, &run.lr_schedule,
           "of one process's updates", {"linear", "cosine", "constant"});
  line.add({"--num-warmup-steps", "it is --warmup"}, &run.warmup,
           "steps over which the rate rises");
  line.add("--max-grad-norm", &script.max_grad_norm,
           "largest norm of a gradient; 0 for no clipping");
  line.add({"--checkpointing-steps", may_differ::kOutput},
           &script.checkpointing_steps,
           "updates between two calls of save_state");
  line.add({"--output-dir", may_differ::kOutput}, &script.output_dir,
           "their folder, in which a state is step_N");
  line.add({"--resume-from-checkpoint", may_differ::kOutput},
           &script.resume_from_checkpoint,
           "load_state from this folder, such as DIR/step_N");
  line.add({"--check", may_differ::kOutput}, &run.check,
           "compare with one process");
  line.group("Accelerator");
  line.add({"--plugin", may_differ::kPlace}, &script.plugin, "the library",
           {"ddp", "fsdp", "deepspeed", "megatron"});
  line.add("--mixed-precision", &accelerator.mixed_precision,
           "element type that the model is cast to", {"no", "bf16", "fp16"});
  line.add({"--gradient-accumulation-steps",
            "the samples of an update are compared"},
           &accelerator.gradient_accumulation_steps, "batches of an update", 1);
  line.add({"--split-batches", "the samples of an update are compared"},
           &accelerator.split_batches,
           "cut every batch into one part per process");
  line.add("--even-batches", &accelerator.even_batches,
           "repeat the first samples in a round that is not full");
  add_plugin_fields(line, script);
  line.at_end([&line, &run] { run.effective = line.values(); });
}

int data_parallel_size(const ScriptOptions& script) {
  if (script.plugin != "megatron") return script.run.world_size;
  return hybrid_options(script.megatron, script.run.world_size).dp;
}

std::vector<std::vector<std::int64_t>> rounds_of(const ScriptOptions& script,
                                                 std::int64_t epoch) {
  ddp::SamplerOptions order;
  order.shuffle = script.shuffle;
  order.seed = script.run.seed;
  ddp::DistributedSampler sampler(script.num_samples, 1, 0, order);
  sampler.set_epoch(epoch);
  const int ranks = data_parallel_size(script);
  const ShardOptions deal = {script.batch_size,
                             script.accelerator.split_batches,
                             script.accelerator.even_batches, script.drop_last};
  std::vector<std::vector<std::int64_t>> rounds;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto batches = shard_batches(sampler.indices(), deal, ranks, rank);
    rounds.resize(std::max(rounds.size(), batches.size()));
    for (std::size_t i = 0; i < batches.size(); ++i) {
      rounds[i].insert(rounds[i].end(), batches[i].begin(), batches[i].end());
    }
  }
  return rounds;
}

namespace {

std::int64_t windows(std::int64_t batches, std::int64_t g) {
  return (batches + g - 1) / g;
}

/// The fields of --plugin deepspeed; one that is not given follows the config.
DeepSpeedPlugin deepspeed_fields(const CommandLine& line,
                                 const ScriptOptions& script) {
  DeepSpeedPlugin fields = script.deepspeed;
  if (!line.has("--zero-stage")) fields.zero_stage.reset();
  if (!line.has("--offload-optimizer-device")) {
    fields.offload_optimizer_device.reset();
  }
  if (!line.has("--offload-param-device")) fields.offload_param_device.reset();
  // The engine clips, and not the script's call
  if (fields.hf_ds_config.empty() || line.has("--max-grad-norm")) {
    fields.gradient_clipping = script.max_grad_norm;
  }
  return fields;
}

/// Takes over the optimizer, rates, clipping and dtype of a config.
void follow_config(const CommandLine& line, const DeepSpeedPlugin& plugin,
                   ScriptOptions& script) {
  Options& run = script.run;
  const AcceleratorOptions& accelerator = script.accelerator;
  KnownValues known;
  known.data_parallel_ranks = run.world_size;
  known.micro_batch_size = accelerator.split_batches
                               ? script.batch_size / run.world_size
                               : script.batch_size;
  known.accumulation = accelerator.gradient_accumulation_steps;
  known.mixed_precision = accelerator.mixed_precision;
  known.optimizer.params = run.optimizer_options;
  known.warmup_num_steps = run.warmup;
  known.total_num_steps = script.max_train_steps;
  known.hidden_size = model_config(run).n_embd;
  const engine::DeepSpeedConfig config = deepspeed_config(plugin, known);

  script.max_grad_norm = config.gradient_clipping;
  narrow(run, config.dtype(run.dtype));
  const auto refuse = [&](const std::string& flag, const std::string& key,
                          const std::string& type) {
    SB_CHECK(!line.has(flag), flag, ": ", config.label, " has ", key, " ", type,
             "; leave one of them out");
  };
  engine::OptimizerConfig optimizer = config.optimizer;
  script.config_has_optimizer = !optimizer.type.empty();
  if (script.config_has_optimizer) {
    refuse("--optimizer", "/optimizer/type", optimizer.type);
    run.optimizer = optimizer.name();
    run.optimizer_options = optimizer.params;
  } else {
    optimizer.params = run.optimizer_options;
  }
  script.config_has_scheduler = !config.scheduler.type.empty();
  if (script.config_has_scheduler) {
    refuse("--lr-scheduler-type", "/scheduler/type", config.scheduler.type);
    run.rate = engine::schedule_of(config, optimizer);
  }
  script.accelerator.compared = engine::compared_keys(config, run.dtype);
}

/// What a script shares with the one that it continues, on any processes.
void note_compared(const CommandLine& line, ScriptOptions& script) {
  if (script.output_dir.empty() && script.resume_from_checkpoint.empty()) {
    return;
  }
  std::vector<ComparedOption>& all = script.accelerator.compared;
  for (const auto& each : {identity_of(script.run), line.compared()}) {
    all.insert(all.end(), each.begin(), each.end());
  }
  const AcceleratorOptions& accelerator = script.accelerator;
  const int ranks = data_parallel_size(script);
  const std::int64_t samples = script.batch_size *
                               accelerator.gradient_accumulation_steps *
                               (accelerator.split_batches ? 1 : ranks);
  all.push_back({"samples of an update", std::to_string(samples), ""});
  // The schedule is written for one process, and moves on for each
  if (script.run.lr_schedule == "constant" && script.run.warmup == 0) return;
  all.push_back({"steps of the schedule in an update",
                 std::to_string(accelerator.split_batches ? 1 : ranks), ""});
}

}  // namespace

void check_script(const CommandLine& line, ScriptOptions& script) {
  for (const auto& [plugin, flags] : script.fields) {
    for (const std::string& flag : flags) {
      SB_CHECK(plugin == script.plugin || !line.has(flag), flag,
               ": a field of --plugin ", plugin, ", and --plugin is ",
               script.plugin, "; leave it out");
    }
  }
  refuse_image_models(script.run, "accelerate's script has a loss of tokens");
  SB_CHECK((script.checkpointing_steps > 0) == !script.output_dir.empty(),
           "--checkpointing-steps ", script.checkpointing_steps,
           ", --output-dir \"", script.output_dir, "\": give both, or none");
  const std::int64_t all = script.epochs * updates_per_epoch(script);
  SB_CHECK(script.max_train_steps <= all, "--max-train-steps ",
           script.max_train_steps, ": --num-train-epochs ", script.epochs,
           " has ", all, " updates; give at most as many");
  if (script.max_train_steps == 0) script.max_train_steps = all;

  AcceleratorOptions& accelerator = script.accelerator;
  if (script.plugin == "fsdp") accelerator.plugin = script.fsdp;
  if (script.plugin == "megatron") accelerator.plugin = script.megatron;
  if (script.plugin == "deepspeed") {
    const DeepSpeedPlugin fields = deepspeed_fields(line, script);
    accelerator.plugin = fields;
    follow_config(line, fields, script);
  }
  // A call with 0 would bring the gradient to the norm 0
  if (script.max_grad_norm == 0) {
    script.max_grad_norm = std::numeric_limits<double>::infinity();
  }
  if (accelerator.mixed_precision != "no") {
    narrow(script.run, engine::dtype_of(accelerator.mixed_precision));
  }
  note_compared(line, script);
  check_launch(script.run.world_size, launch_options(script.run));
}

std::int64_t updates_per_epoch(const ScriptOptions& script) {
  return windows(static_cast<std::int64_t>(rounds_of(script, 0).size()),
                 script.accelerator.gradient_accumulation_steps);
}

std::int64_t updates_done(const ScriptOptions& script,
                          const PreparedLoader& loader) {
  return loader.epoch() * updates_per_epoch(script) +
         windows(loader.batches_done(),
                 script.accelerator.gradient_accumulation_steps);
}

}  // namespace shardbook::accelerate
