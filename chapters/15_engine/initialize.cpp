// From a model and a config to an engine.

#include <algorithm>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "chapters/common/models/models.h"
#include "core/check.h"

namespace shardbook::engine {
namespace {

/// A module has no layers that a config could cut or replace.
void refuse_cut_models(const DeepSpeedConfig& config) {
  const BookConfig& book = config.book;
  const std::string key =
      config.degrees.pp > 1           ? "/pipeline/stages"
      : config.degrees.tp > 1         ? "/shardbook/tensor_parallel"
      : config.degrees.cp > 1         ? "/shardbook/context_parallel"
      : book.has_experts()            ? "/shardbook/experts"
      : book.sharding != "zero"       ? "/shardbook/sharding"
      : book.recompute == "attention" ? "/shardbook/recompute \"attention\""
                                      : "";
  SB_CHECK(
      key.empty(), config.label, ": ", key,
      " needs a model of the book, whose layers the engine can choose; "
      "give its name (--model) in place of a module, or leave the key out");
}

void choose_parameters(Module& model, const Tensors& chosen) {
  if (chosen.empty()) return;
  const Tensors all = model.parameters();
  const auto is_in = [](const Tensors& list, const Tensor& tensor) {
    return std::any_of(list.begin(), list.end(), [&](const Tensor& each) {
      return each.is_same(tensor);
    });
  };
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    SB_CHECK(is_in(all, chosen[i]), "initialize: model_parameters: number ", i,
             " is no parameter of the model");
  }
  for (const Tensor& each : all) each.set_requires_grad(is_in(chosen, each));
}

void recompute_blocks(Module& module, DeepSpeedConfig& config) {
  if (config.recompute() != "blocks") return;
  bool has_blocks = false;
  for (const NamedModule& each : module.named_modules()) {
    const std::string type = each.module->type_name();
    has_blocks = has_blocks || type == "GptBlock" || type == "ResNetBlock";
  }
  // DeepSpeed's section says how a model recomputes, if it does
  if (!has_blocks && config.book.recompute == "never") return;
  SB_CHECK(has_blocks, config.label,
           ": /shardbook/recompute \"blocks\": the module has no blocks of the "
           "book's GPT or ResNet; leave the key out");
  config.book.recompute = "blocks";
  set_recompute(module, true);
}

OptimizerConfig optimizer_of(const DeepSpeedConfig& config,
                             const InitializeArgs& args) {
  const OptimizerConfig chosen =
      args.optimizer ? *args.optimizer : config.optimizer;
  SB_CHECK(!chosen.type.empty(), config.label,
           ": /optimizer is missing, and initialize was given no optimizer; "
           "give one of them");
  return chosen;
}

}  // namespace

LrSchedule schedule_of(const DeepSpeedConfig& config,
                       const OptimizerConfig& optimizer) {
  const SchedulerConfig& from = config.scheduler;
  return warmup_schedule(
      {.min_lr = from.warmup_min_lr,
       .max_lr = from.warmup_max_lr.value_or(optimizer.params.lr),
       .num_steps = from.warmup_num_steps,
       .is_log = from.warmup_type == "log",
       .total_steps = from.total_num_steps});
}

std::shared_ptr<LrScheduler> make_scheduler(const DeepSpeedConfig& config,
                                            const OptimizerConfig& optimizer) {
  if (config.scheduler.type.empty()) return nullptr;
  return std::make_shared<LrScheduler>(schedule_of(config, optimizer));
}

Initialized initialize(Module& model, const DeepSpeedConfig& given,
                       ProcessGroup& world, const InitializeArgs& args) {
  SB_CHECK(args.deepspeed_config.empty(), "initialize: a config, and ",
           args.deepspeed_config,
           " in args.deepspeed_config as well; give one of them");
  refuse_cut_models(given);
  const Mpu& mpu = args.mpu;
  SB_CHECK((mpu.data != nullptr) == (mpu.model != nullptr),
           "initialize: mpu has one of its two groups; give both, or none");
  ProcessGroup& dp = mpu.data != nullptr ? *mpu.data : world;
  const BatchSizes sizes = resolve_batch(given.batch, dp.size());
  SB_CHECK(!sums_in_f32(given, given.dtype(DType::kF32), sizes.accumulation) ||
               given.zero.stage >= 2,
           given.label, ": /data_types/grad_accum_dtype \"fp32\" with ",
           "/zero_optimization/stage ", given.zero.stage,
           " needs a model of the book; give its name (--model) in place of a "
           "module, or stage 2 or 3, or leave the key out");
  // The engine's config names the optimizer in use
  DeepSpeedConfig config = given;
  config.optimizer = optimizer_of(given, args);

  // Cast, choose what is trained, wrap: the wrapper copies the first rank's weights
  choose_parameters(model, args.model_parameters);
  recompute_blocks(model, config);
  const DType dtype = config.dtype(DType::kF32);
  if (dtype != DType::kF32) internal::cast(model, dtype);
  auto wrapped = internal::make_model(model, config, mpu, world);

  auto scheduler = args.lr_scheduler ? args.lr_scheduler
                                     : make_scheduler(config, config.optimizer);
  Initialized all;
  all.engine = std::make_unique<Engine>(config, sizes, world,
                                        std::move(wrapped), nullptr, scheduler);
  all.optimizer = &all.engine->optimizer();
  all.lr_scheduler = scheduler.get();
  if (args.training_data) {
    const LoaderOptions loader = {.micro_batch_size = sizes.micro,
                                  .seed = args.seed};
    all.loader = std::make_unique<Loader>(*args.training_data, loader, dp);
  }
  return all;
}

Initialized initialize(Module& model, ProcessGroup& world,
                       const InitializeArgs& args) {
  SB_CHECK(!args.deepspeed_config.empty(),
           "initialize: there is no config; give one, or its file in "
           "args.deepspeed_config");
  InitializeArgs rest = args;
  rest.deepspeed_config.clear();
  return initialize(model, DeepSpeedConfig::read(args.deepspeed_config), world,
                    rest);
}

}  // namespace shardbook::engine
