#include "chapters/common/sharded/sharded_strategy.h"

#include <cmath>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "core/check.h"

namespace shardbook {
namespace {

// The model's sizes with the rows that the embedding really has.
ModelConfig padded(ModelConfig config, std::int64_t vocabulary) {
  if (vocabulary > 0) config.vocab_size = vocabulary;
  return config;
}

}  // namespace

ModelConfig sharded_gpt_config(const ModelOptions& options) {
  const ModelConfig config = model_config(options);
  SB_CHECK(config.has_blocks(), "--model ", options.model,
           ": this chapter shards the layers of a GPT; give gpt-nano, gpt2 or "
           "another one of its family");
  return config;
}

void add_passes(CommandLine& line, Passes& passes) {
  line.add({"--micro-batches", may_differ::kSums}, &passes.micro_batches,
           "micro-batches per step", 1);
  line.add(
      {"--recompute", may_differ::kPlace}, &passes.recompute,
      "keep the inputs of blocks only, and compute them again in backward");
}

ShardedStrategy::ShardedStrategy(const Options& options, ShardedModel sharded,
                                 ProcessGroup& group, const Passes& passes)
    : options_(options),
      group_(group),
      passes_(passes),
      sharded_(std::move(sharded)),
      config_(sharded_.make ? model_config(options)
                            : sharded_gpt_config(options)),
      data_(Dataset::open(options, config_)) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  const ModelConfig config = padded(config_, sharded_.padded_vocabulary);
  model_ = sharded_.make ? sharded_.make(config, init)
                         : std::make_unique<Gpt>(config, init, sharded_.layers);
  set_recompute(*model_, passes.recompute);
  if (!options.load.empty()) {
    load_model(
        options.load, *model_, config_,
        part_of(sharded_.layout, group_.rank(), sharded_.padded_vocabulary));
  }
  for (const NamedTensor& each : model_->named_parameters()) {
    if (is_first_holder(sharded_.layout, each.name, group_.rank())) {
      own_.push_back(each);
    }
  }
  optimizer_ = make_optimizer(options.optimizer, model_->parameters(),
                              options.optimizer_options);
}

StepResult ShardedStrategy::step(std::int64_t step) {
  StepResult result;
  result.loss = accumulate_gradients(
      options_, *model_, data_, step,
      strided_micro_batches(options_.batch, passes_.micro_batches), 1,
      sharded_.layers.loss);
  if (sharded_.finish_gradients) {
    sharded_.finish_gradients(model_->named_parameters());
  }

  // The norm counts every element of the whole model once
  const double norm_here = norm_of_own_gradients();
  result.grad_norm =
      std::sqrt(sum_over_ranks(group_, norm_here * norm_here, "norm"));
  clip_and_update(options_, *optimizer_, result.grad_norm);
  return result;
}

double ShardedStrategy::norm_of_own_gradients() const {
  const NoGrad no_grad;
  const PhaseScope phase(Phase::kOptimizer);
  double squares = 0;
  for (const NamedTensor& each : own_) {
    const Tensor grad = each.tensor.grad();
    if (!grad.defined()) continue;
    const Shards shards = sharded_.layout(each.name, group_.rank());
    for (const Tensor& part : first_held(grad, shards)) {
      squares += sum_of_squares(part);
    }
  }
  return std::sqrt(squares);
}

std::vector<NamedTensor> ShardedStrategy::full_state() {
  return gather_parts(model_->named_parameters(), sharded_.layout, group_,
                      config_.vocab_size);
}

TrainingState ShardedStrategy::state() {
  TrainingState state;
  add_whole(state, model_->named_parameters(), *optimizer_);
  place_parts(state, sharded_.layout, group_.rank(), config_.vocab_size);
  return state;
}

double ShardedStrategy::predicted_norm_bytes() const {
  const double ranks = group_.size();
  return 2 * (ranks - 1) / ranks * 8;
}

ShardedSizes ShardedStrategy::sizes() const {
  ShardedSizes s;
  s.micro_batches = static_cast<double>(passes_.micro_batches);
  s.recompute = passes_.recompute;
  s.tokens =
      static_cast<double>(options_.batch * options_.seq) / s.micro_batches;
  s.seq = static_cast<double>(options_.seq);
  s.h = static_cast<double>(config_.n_embd);
  s.heads = static_cast<double>(config_.n_head);
  s.layers = static_cast<double>(config_.n_layer);
  s.block = block_table(config_);
  const DecoderNames names = decoder_names(config_);
  s.tables = names.head.empty() ? 1 : 2;
  s.positions =
      names.positions.empty() ? 0 : static_cast<double>(config_.n_positions);
  s.vocabulary = static_cast<double>(
      padded(config_, sharded_.padded_vocabulary).vocab_size);
  s.element = static_cast<double>(dtype_bytes(options_.dtype));
  s.stat = options_.dtype == DType::kF64 ? 8 : 4;
  return s;
}

Bill ShardedStrategy::bill_of(double parameters, double kept_bytes,
                              double step_bytes) const {
  const ShardedSizes s = sizes();
  Bill bill;
  bill.bytes = static_cast<double>(options_.steps) *
               (step_bytes + predicted_norm_bytes());
  const bool trains = options_.steps > 0;
  bill.memory[MemoryKind::kParameter] = parameters * s.element;
  bill.memory[MemoryKind::kGradient] = trains ? parameters * s.element : 0;
  bill.memory[MemoryKind::kOptimizerState] =
      trains ? optimizer_states(options_) * parameters * s.stat : 0;
  bill.memory[MemoryKind::kActivation] = trains ? kept_bytes : 0;
  return bill;
}

}  // namespace shardbook
