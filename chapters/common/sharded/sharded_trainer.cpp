#include "chapters/common/sharded/sharded_trainer.h"

#include <cmath>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "core/check.h"
#include "core/copy_runs.h"
#include "core/inplace.h"

namespace shardbook {
namespace {

constexpr char kTokenEmbedding[] = "transformer.wte.weight";

ModelConfig gpt_config(const Options& options) {
  ModelConfig config = model_config(options);
  SB_CHECK(config.type == "gpt2", "--model ", options.model,
           ": this chapter shards the layers of a GPT; give gpt-nano, gpt2 or "
           "another one of its family");
  return config;
}

// The model's sizes with the rows that the embedding really has.
ModelConfig padded(ModelConfig config, std::int64_t vocabulary) {
  if (vocabulary > 0) config.vocab_size = vocabulary;
  return config;
}

}  // namespace

ShardedTrainer::ShardedTrainer(const Options& options, ShardedModel sharded,
                               ProcessGroup& group, std::int64_t micro_batches,
                               bool recompute)
    : options_(options),
      group_(group),
      micro_batches_(micro_batches),
      sharded_(std::move(sharded)),
      config_(gpt_config(options)),
      data_(Dataset::open(options, config_)) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  model_ = std::make_unique<Gpt>(padded(config_, sharded_.padded_vocabulary),
                                 init, sharded_.layers);
  set_recompute(*model_, recompute);
  if (!options.load.empty()) {
    load_model(options.load, *model_, [&](const std::string& name) {
      return PartOfFile{
          sharded_.layout(name, group_.rank()),
          name == kTokenEmbedding ? sharded_.padded_vocabulary : 0};
    });
  }
  for (const NamedTensor& each : model_->named_parameters()) {
    if (first_holder(sharded_.layout, each.name, group_.rank()) ==
        group_.rank()) {
      own_.push_back(each.tensor);
    }
  }
  optimizer_ = make_optimizer(options.optimizer, model_->parameters(),
                              options.optimizer_options);
}

StepResult ShardedTrainer::step(std::int64_t step) {
  StepResult result;
  result.loss = accumulate_gradients(
      options_, *model_, data_, step,
      strided_micro_batches(options_.batch, micro_batches_), 1,
      sharded_.layers.loss);
  if (sharded_.finish_gradients) {
    sharded_.finish_gradients(model_->named_parameters());
  }

  // The norm counts every element of the whole model once
  const double norm_here = grad_norm(own_);
  Tensor sum;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    sum = Tensor::full({}, norm_here * norm_here, {DType::kF64, Device()});
  }
  group_.all_reduce(sum, ReduceOp::kSum, "norm").wait();
  result.grad_norm = std::sqrt(sum.item());
  clip_and_update(options_, *optimizer_, result.grad_norm);
  return result;
}

std::vector<NamedTensor> ShardedTrainer::full_state() {
  std::vector<NamedTensor> state =
      collect_parts(model_->named_parameters(), sharded_.layout, group_);
  for (NamedTensor& each : state) {
    if (each.name != kTokenEmbedding) continue;
    each.tensor = each.tensor.rows_view(0, config_.vocab_size);
  }
  return state;
}

double ShardedTrainer::predicted_norm_bytes() const {
  const double ranks = group_.size();
  return 2 * (ranks - 1) / ranks * 8;
}

int first_holder(const ParameterLayout& layout, const std::string& name,
                 int rank) {
  const Shards part = layout(name, rank);
  int first = 0;
  while (!(layout(name, first) == part)) ++first;
  return first;
}

std::vector<NamedTensor> collect_parts(const std::vector<NamedTensor>& parts,
                                       const ParameterLayout& layout,
                                       ProcessGroup& group) {
  std::vector<NamedTensor> whole_ones;
  const NoGrad no_grad;
  int tag = -1;
  for (const NamedTensor& part : parts) {
    ++tag;
    if (group.rank() != 0) {
      if (first_holder(layout, part.name, group.rank()) == group.rank()) {
        group.send(part.tensor, 0, tag).wait();
      }
      continue;
    }
    Shape shape = part.tensor.shape();
    for (const Shard& shard : layout(part.name, 0)) {
      shape[static_cast<std::size_t>(shard.dim)] *= shard.count;
    }
    const Tensor whole = Tensor::empty(shape, {part.tensor.dtype(), Device()});
    for (int rank = 0; rank < group.size(); ++rank) {
      if (first_holder(layout, part.name, rank) != rank) continue;
      const Shards shards = layout(part.name, rank);
      const Tensor theirs =
          Tensor::empty(shape_of(shards, shape), whole.options());
      if (rank == 0) {
        theirs.copy_from(part.tensor);
      } else {
        group.recv(theirs, rank, tag).wait();
      }
      put_part(whole, theirs, shards);
    }
    whole_ones.push_back({part.name, whole});
  }
  return whole_ones;
}

std::int64_t padded_vocabulary(std::int64_t vocabulary, std::int64_t parts) {
  return (vocabulary + parts - 1) / parts * parts;
}

void check_divides(const std::string& what, std::int64_t n, std::int64_t parts,
                   const std::string& why) {
  SB_CHECK(n % parts == 0, what, " ", n, ": ", why, " ", parts, " parts; give ",
           n / parts * parts + parts);
}

void sum_gradients(ProcessGroup& group, const Tensors& parameters,
                   const std::string& label, double factor) {
  if (parameters.empty()) return;
  if (group.size() == 1) {
    for (const Tensor& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      scale_into(parameter.grad(), parameter.grad(), factor);
    }
    return;
  }
  const Tensor& first = parameters[0];
  std::int64_t numel = 0;
  for (const Tensor& parameter : parameters) numel += parameter.numel();
  Tensor sums;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    sums = Tensor::zeros({numel}, first.options());
  }
  std::vector<CopyRun> there, back;
  std::int64_t next = 0;
  for (const Tensor& parameter : parameters) {
    const Tensor place = sums.flat_view(next, parameter.shape());
    next += parameter.numel();
    Tensor grad = parameter.grad();
    if (!grad.defined()) {
      const MemoryScope kind(MemoryKind::kGradient);
      grad = parameter.zeros_like();
      parameter.set_grad(grad);
    }
    there.push_back({place, grad});
    back.push_back({grad, place});
  }
  copy_runs(there, factor);
  group.all_reduce(sums, ReduceOp::kSum, label).wait();
  copy_runs(back);
}

}  // namespace shardbook
