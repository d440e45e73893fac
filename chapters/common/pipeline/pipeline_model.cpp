#include "chapters/common/pipeline/pipeline_model.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/training.h"
#include "chapters/common/sharded/parts.h"
#include "core/check.h"

namespace shardbook {

PipelineLayout one_stage_per_rank(const std::vector<int>& cuts) {
  PipelineLayout layout;
  layout.cuts = cuts;
  for (std::size_t s = 0; s + 1 < cuts.size(); ++s) {
    layout.owners.push_back({static_cast<int>(s)});
  }
  return layout;
}

// --- The rank's stages -------------------------------------------------------

PipelineModel::PipelineModel(const Options& options,
                             std::shared_ptr<const LayerList> layers,
                             PipelineLayout layout, ProcessGroup& world,
                             const PartOf& part_of)
    : layout_(std::move(layout)),
      layers_(std::move(layers)),
      world_(world),
      dtype_(options.dtype) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  std::map<std::string, Tensor> mine;
  // The ranks that hold each parameter; every rank computes the same map
  std::map<std::string, std::set<int>> holders;
  InitOptions on_meta;
  on_meta.device = Device::meta();
  for (int s = 0; s < layout_.num_stages(); ++s) {
    const auto& owners = layout_.owners[static_cast<std::size_t>(s)];
    const int begin = layout_.begin(s), end = layout_.end(s);
    Stage shapes(layers_->on_shapes(), begin, end, on_meta);
    for (const NamedTensor& each : shapes.named_parameters()) {
      holders[each.name].insert(owners.begin(), owners.end());
    }
    if (std::find(owners.begin(), owners.end(), world.rank()) == owners.end()) {
      continue;
    }
    auto stage = std::make_unique<Stage>(*layers_, begin, end, init, &mine);
    if (!options.load.empty()) {
      load_model(options.load, *stage, model_config(options), part_of);
    }
    for (const NamedTensor& each : stage->named_parameters()) {
      const auto same = [&](const Tensor& p) { return p.is_same(each.tensor); };
      if (std::any_of(parameters_.begin(), parameters_.end(), same)) continue;
      parameters_.push_back(each.tensor);
    }
    stages_.emplace(s, std::move(stage));
  }
  // A group per set of holders, created by all ranks in the same order
  std::map<std::vector<int>, std::shared_ptr<ProcessGroup>> groups;
  for (const auto& [name, ranks] : holders) {
    if (ranks.size() < 2) continue;
    const std::vector<int> members(ranks.begin(), ranks.end());
    if (groups.count(members) == 0) {
      groups[members] =
          world.subgroup(members, "tied " + std::to_string(groups.size()));
    }
    if (groups[members] == nullptr) continue;
    shared_.push_back({mine.at(name), groups[members]});
  }
  for (const auto& [name, tensor] : mine) {
    if (!tensor.requires_grad()) continue;
    if (*holders[name].begin() == world.rank()) own_.push_back(tensor);
  }
}

Stage& PipelineModel::stage(int s) {
  const auto found = stages_.find(s);
  SB_CHECK(found != stages_.end(), "stage ", s, ": not on rank ",
           world_.rank());
  return *found->second;
}

void PipelineModel::reduce_shared_gradients() {
  for (const Shared& each : shared_) {
    Tensor grad = each.parameter.grad();
    if (!grad.defined()) {
      MemoryScope kind(MemoryKind::kGradient);
      grad = each.parameter.zeros_like();
      each.parameter.set_grad(grad);
    }
    each.group->all_reduce(grad, ReduceOp::kSum, "tied gradient").wait();
  }
}

StepResult PipelineModel::update(const Options& options, Optimizer& optimizer,
                                 double local_loss) {
  const double norm_here = grad_norm(own_);
  const std::vector<double> sums = sum_over_ranks(
      world_, {local_loss, norm_here * norm_here}, "loss and norm");
  StepResult result;
  result.loss = sums[0];
  result.grad_norm = std::sqrt(sums[1]);
  clip_and_update(options, optimizer, result.grad_norm);
  return result;
}

double PipelineModel::predicted_update_bytes() const {
  const auto all_reduce = [](double bytes, int ranks) {
    return 2.0 * (ranks - 1) / ranks * bytes;
  };
  double bytes = all_reduce(16, world_.size());
  for (const Shared& each : shared_) {
    bytes += all_reduce(static_cast<double>(each.parameter.bytes()),
                        each.group->size());
  }
  return bytes;
}

std::vector<NamedTensor> PipelineModel::named_state() {
  std::vector<NamedTensor> state;
  std::set<std::string> seen;
  for (const auto& [s, stage] : stages_) {
    for (NamedTensor& each : state_of(*stage)) {
      if (seen.insert(each.name).second) state.push_back(std::move(each));
    }
  }
  return state;
}

std::vector<NamedTensor> PipelineModel::full_parameters() {
  InitOptions on_meta;
  on_meta.device = Device::meta();
  on_meta.dtype = dtype_;
  std::vector<NamedTensor> all;
  std::set<std::string> seen;
  int tag = 0;
  for (int s = 0; s < layout_.num_stages(); ++s) {
    const int owner = layout_.owners[static_cast<std::size_t>(s)].front();
    Stage shapes(layers_->on_shapes(), layout_.begin(s), layout_.end(s),
                 on_meta);
    std::map<std::string, Tensor> here;
    if (owner == world_.rank()) {
      for (NamedTensor& each : state_of(stage(s))) {
        here.emplace(each.name, each.tensor);
      }
    }
    for (const NamedTensor& member : state_of(shapes)) {
      if (!seen.insert(member.name).second) continue;
      ++tag;
      if (owner == world_.rank() && world_.rank() == 0) {
        all.push_back({member.name, here.at(member.name)});
      } else if (owner == world_.rank()) {
        world_.send(here.at(member.name).detach(), 0, tag, member.name).wait();
      } else if (world_.rank() == 0) {
        // The device never holds the whole model
        RankContext& context = RankContext::current();
        const Device& arrival =
            context.device.is_cuda() ? context.device : context.host();
        const Tensor value = Tensor::empty(member.tensor.shape(),
                                           {member.tensor.dtype(), arrival});
        world_.recv(value, owner, tag, member.name).wait();
        all.push_back(on_host({{member.name, value}})[0]);
      }
    }
  }
  return all;
}

// --- The rows of each micro-batch --------------------------------------------

namespace pipeline {

LanguageFeed::LanguageFeed(const Options& options, const Dataset& data,
                           std::vector<MicroBatch> pieces, LossFunction loss_of)
    : data_(data),
      rows_per_step_(options.batch),
      dtype_(options.dtype),
      pieces_(std::move(pieces)),
      loss_of_(std::move(loss_of)) {}

Piece LanguageFeed::piece(int micro_batch) const {
  const auto m = static_cast<std::int64_t>(pieces_.size());
  const MicroBatch& rows = pieces_[static_cast<std::size_t>(micro_batch % m)];
  Piece piece;
  piece.step = static_cast<std::uint64_t>(first_step_ + micro_batch / m);
  piece.slice = rows.slice;
  piece.rows = rows.rows;
  piece.share =
      static_cast<double>(rows.rows) / static_cast<double>(rows_per_step_);
  return piece;
}

Batch LanguageFeed::batch(int micro_batch) const {
  const Piece rows = piece(micro_batch);
  return data_.batch(static_cast<std::int64_t>(rows.step), rows_per_step_,
                     rows.slice, rows.rows);
}

Tensors LanguageFeed::inputs(int micro_batch) {
  return {batch(micro_batch).inputs};
}

Tensor LanguageFeed::loss(int micro_batch, const Tensors& outputs) {
  return loss_of_(outputs[0], batch(micro_batch).targets);
}

Tensors LanguageFeed::example(std::int64_t rows) const {
  RankContext on_shapes(Device::meta());
  const RankContext::Scope scope(on_shapes);
  return {data_.batch(0, rows_per_step_, BatchSlice{}, rows).inputs};
}

}  // namespace pipeline
}  // namespace shardbook
