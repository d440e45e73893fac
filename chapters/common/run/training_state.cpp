#include "chapters/common/run/training_state.h"

#include <fmt/format.h>

#include <algorithm>

#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/training.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {

void add_whole(TrainingState& state, const std::vector<NamedTensor>& tensors,
               Optimizer& optimizer) {
  const Tensors& trained = optimizer.parameters();
  for (const NamedTensor& each : tensors) {
    StatePart part;
    part.name = each.name;
    part.whole = each.tensor.shape();
    part.values = each.tensor;
    const auto slot = std::find_if(
        trained.begin(), trained.end(),
        [&](const Tensor& one) { return one.is_same(each.tensor); });
    if (slot != trained.end()) {
      part.optimizer = &optimizer;
      part.slot = static_cast<std::size_t>(slot - trained.begin());
    }
    state.parts.push_back(std::move(part));
  }
}

void add_loss_scale(TrainingState& state, DynamicLossScaler& scaler) {
  for (const auto& [name, value] : scaler.state()) state.numbers[name] = value;
  state.loaded = [&scaler, then = state.loaded](
                     const std::map<std::string, double>& numbers) {
    scaler.load_state(numbers);
    if (then) then(numbers);
  };
}

void agree_on_images(TrainingState& state, const Options& options,
                     const MicroBatch& first) {
  if (!model_config(options).is_image()) return;
  const std::int64_t stride = first.slice.stride;
  state.agreed["batch norms see"] =
      stride == 1 ? fmt::format("{} images in a row", first.rows)
                  : fmt::format("{} images, each {} apart", first.rows, stride);
}

std::vector<StateField> fields_of(const StatePart& part) {
  std::vector<StateField> fields = {{"parameter", part.values}};
  if (part.optimizer == nullptr) return fields;
  const OptimizerSlot& slot = part.optimizer->slots()[part.slot];
  const auto add = [&](const std::string& name, const Tensor& flat) {
    fields.push_back(
        {name, flat.flat_view(part.slot_begin, {part.values.numel()})});
  };
  if (slot.master.defined()) add("master", slot.master);
  const std::vector<std::string> names = part.optimizer->state_names();
  for (std::size_t i = 0; i < slot.state.size(); ++i) {
    add(names[i], slot.state[i]);
  }
  return fields;
}

std::int64_t updates_of(const StatePart& part) {
  return part.optimizer == nullptr ? 0
                                   : part.optimizer->slots()[part.slot].step;
}

void make_optimizer_state(const StatePart& part, std::int64_t updates) {
  if (part.optimizer == nullptr || updates == 0) return;
  const Tensor& parameter = part.optimizer->parameters()[part.slot];
  OptimizerSlot& slot = part.optimizer->slots()[part.slot];
  const MemoryScope kind(MemoryKind::kOptimizerState);
  // The precision of statistics: f32, or f64 for f64
  const DType dtype =
      parameter.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  while (slot.state.size() < part.optimizer->state_names().size()) {
    slot.state.push_back(
        Tensor::zeros({parameter.numel()}, {dtype, parameter.device()}));
  }
  slot.step = updates;
}

std::vector<IndexRun> flat_runs(const Shards& shards, const Shape& whole,
                                std::int64_t begin, std::int64_t count) {
  // Dimension by dimension: the rows of the part, then the runs in each row
  std::vector<IndexRun> runs = {{0, 1}};
  for (std::size_t d = 0; d < whole.size(); ++d) {
    const auto cuts = runs_of(shards, whole, static_cast<std::int64_t>(d));
    const bool is_whole =
        cuts.size() == 1 && cuts[0].begin == 0 && cuts[0].count == whole[d];
    std::vector<IndexRun> next;
    for (const IndexRun& run : runs) {
      if (is_whole) {
        next.push_back({run.begin * whole[d], run.count * whole[d]});
        continue;
      }
      for (std::int64_t i = run.begin; i < run.begin + run.count; ++i) {
        for (const IndexRun& cut : cuts) {
          next.push_back({i * whole[d] + cut.begin, cut.count});
        }
      }
    }
    runs = std::move(next);
  }
  // Of these runs, the elements from `begin` on
  std::vector<IndexRun> result;
  for (const IndexRun& run : runs) {
    const std::int64_t from = std::clamp<std::int64_t>(begin, 0, run.count);
    const std::int64_t n = std::min(run.count - from, count);
    begin -= run.count;
    if (n <= 0) continue;
    result.push_back({run.begin + from, n});
    count -= n;
  }
  return result;
}

}  // namespace shardbook
