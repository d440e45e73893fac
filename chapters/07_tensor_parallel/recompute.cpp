#include "chapters/07_tensor_parallel/recompute.h"

#include <memory>
#include <optional>
#include <utility>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "core/tensor_storage.h"

namespace shardbook::tensor_parallel {
namespace {

// Copies this rank's part of x, viewed as one row, and frees x.
Tensor keep_part(const Tensor& x, ProcessGroup& group) {
  const std::int64_t own =
      exact_part(x.numel(), group.size(), "the input of a block");
  const Tensor part = x.flat_view(group.rank() * own, {own}).clone();
  release_storage(x);
  return part;
}

void bring_back(const Tensor& x, const Tensor& part, ProcessGroup& group) {
  restore_storage(x);
  group.all_gather(x.flat_view(0, {x.numel()}), part, "saved input").wait();
}

}  // namespace

DroppedForward::DroppedForward(const Tensor& x, const RecomputeOptions& options)
    : x_(x),
      setup_(options),
      streams_(options.rng->states()),
      unrecorded_(std::in_place) {}

Tensor DroppedForward::finish(const Tensor& y,
                              std::function<Tensor(const Tensor& x)> again) {
  unrecorded_.reset();
  ProcessGroup* group = setup_.distribute_over;
  if (group != nullptr && group->size() == 1) group = nullptr;
  // autograd::recompute calls the function twice: now, when the result exists,
  // and in backward
  const auto result = std::make_shared<Tensor>(y);
  const auto part = std::make_shared<Tensor>();
  const Tensor linked = autograd::recompute(
      [result, part, group, again, rng = setup_.rng,
       streams = streams_](const Tensors& inputs) {
        const Tensor first = std::exchange(*result, Tensor());
        if (first.defined()) return Tensors{first};
        // Bring the whole input back
        if (group != nullptr) {
          bring_back(inputs[0], *part, *group);
          *part = Tensor();
        }
        // Draw the same masks, from all streams
        const Replay replay(*rng, streams);
        return Tensors{again(inputs[0])};
      },
      {x_})[0];
  if (group != nullptr) *part = keep_part(x_, *group);
  return linked;
}

void recompute_blocks(Module& model, const RecomputeOptions& options) {
  for (const NamedModule& each : model.named_modules()) {
    if (dynamic_cast<GptBlock*>(each.module) == nullptr) continue;
    const auto under_way = std::make_shared<std::optional<DroppedForward>>();
    each.module->add_forward_pre_hook([=](Module&, Tensors& inputs) {
      if (RankContext::current().grad_enabled) {
        under_way->emplace(inputs[0], options);
      }
    });
    each.module->add_forward_hook([=](Module& block, Tensors& outputs) {
      if (!under_way->has_value()) return;
      outputs[0] = (*under_way)->finish(outputs[0], [&block](const Tensor& x) {
        return block.forward(x);
      });
      under_way->reset();
    });
  }
}

}  // namespace shardbook::tensor_parallel
