// The engine: what a rank does with its stage.

#include "chapters/05_gpipe/gpipe.h"

#include <algorithm>
#include <utility>

#include "core/autograd.h"
#include "core/check.h"
#include "core/ops.h"
#include "sim/virtual_clock.h"

namespace shardbook::gpipe {

Pipeline::Pipeline(PipelineModel& model, ProcessGroup& world,
                   std::vector<MicroBatch> pieces, PieceShapes shapes,
                   const PipelineOptions& options)
    : model_(model),
      stage_(world.rank()),
      num_stages_(model.layout().num_stages()),
      layers_(model.stage(stage_)),
      pieces_(std::move(pieces)),
      shapes_(std::move(shapes)),
      options_(options),
      mailbox_(world, num_stages_) {
  SB_CHECK(world.size() == num_stages_, "gpipe: ", num_stages_, " stages on ",
           world.size(), " ranks; each rank holds one");
  for (SkipRoute& route : skip_routes(model.layers(), model.layout().cuts)) {
    skips_[route.name] = route;
  }
  for (const MicroBatch& piece : pieces_) {
    rows_ += static_cast<double>(piece.rows);
  }
  // A mini-batch in pieces updates running statistics once
  defer_batch_norms(layers_);
}

// --- The mini-batch ----------------------------------------------------------

double Pipeline::train(const Feed& feed) {
  feed_ = &feed;
  for (const Action& action : schedule(num_micro_batches())) {
    const sim::ActivityScope activity("micro-batch " +
                                      std::to_string(action.micro_batch));
    switch (action.kind) {
      case ActionKind::kForward:
        forward(action.micro_batch);
        break;
      case ActionKind::kBackward:
        backward(action.micro_batch);
        break;
    }
  }
  // Flush: nothing is on its way when the update begins
  mailbox_.flush();
  commit_batch_norms(layers_);
  RankContext::current().random.batch = BatchSlice{};
  double loss = 0;
  for (int b = num_micro_batches() - 1; b >= 0 && is_last(); --b) {
    loss += losses_.at(b).item() * share(b);
  }
  losses_.clear();
  return loss;
}

Tensors Pipeline::infer(const Feed& feed) {
  feed_ = &feed;
  const NoGrad no_grad;
  std::vector<Tensors> outputs;
  for (int b = 0; b < num_micro_batches(); ++b) {
    set_random_state(b);
    Tensors made = layers_(receive_inputs(b));
    if (!is_last()) {
      send_outputs(made, b);
      continue;
    }
    outputs.resize(made.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      outputs[i].push_back(std::move(made[i]));
    }
  }
  mailbox_.flush();
  RankContext::current().random.batch = BatchSlice{};
  Tensors whole;
  for (const Tensors& parts : outputs) whole.push_back(concat(parts, 0));
  return whole;
}

bool Pipeline::recomputes(int b) const {
  if (options_.checkpoint == Checkpoint::kNever) return false;
  return options_.checkpoint == Checkpoint::kAlways ||
         b != num_micro_batches() - 1;
}

// --- One micro-batch ---------------------------------------------------------

void Pipeline::forward(int b) {
  set_random_state(b);
  Live live;
  live.random = RankContext::current().random;
  live.inputs = receive_inputs(b);
  Tensors outputs;
  if (recomputes(b)) {
    // Keep the inputs alone
    const NoGrad no_grad;
    outputs = function(b)(live.inputs);
  } else {
    // Keep the graph
    live.run = run_forward(function(b), live.inputs, input_spec(b));
    live.inputs.clear();
    outputs = std::exchange(live.run.outputs, {});
  }
  send_outputs(outputs, b);
  live_.emplace(b, std::move(live));
  max_live_ = std::max(max_live_, static_cast<int>(live_.size()));
}

void Pipeline::backward(int b) {
  Live live = std::move(live_.at(b));
  live_.erase(b);
  // Make the graph again while its gradient is still on its way
  if (recomputes(b) && options_.early_recompute) recompute(live, b);
  Tensors grads = receive_gradients(b);
  if (recomputes(b) && !options_.early_recompute) recompute(live, b);
  send_gradients(run_backward(std::move(live.run), std::move(grads)), b);
}

void Pipeline::recompute(Live& live, int b) {
  live.run =
      run_forward_again(function(b), live.inputs, input_spec(b), live.random);
  live.inputs.clear();
  live.run.outputs.clear();
}

// The stage's layers, and behind the last stage the loss: logits of all
// micro-batches would be more than all the rest.
StageFunction Pipeline::function(int b) {
  return [this, b](const Tensors& inputs) {
    Tensors outputs = layers_(inputs);
    return is_last() ? Tensors{feed_->loss(outputs, b)} : outputs;
  };
}

// Dropout draws what one device would draw: by the row in the global batch, and
// by the number of the random operation in the whole model.
void Pipeline::set_random_state(int b) {
  RandomState& random = RankContext::current().random;
  random.batch = pieces_[static_cast<std::size_t>(b)].slice;
  random.next_op = input_spec(b).first_random_op;
}

// --- What comes and goes: values next door, skips directly -------------------

Tensors Pipeline::receive_inputs(int b) {
  if (is_first()) return feed_->inputs(b);
  Tensors inputs =
      mailbox_.receive_forward(input_spec(b), b, stage_, stage_ - 1);
  for (const std::string& name : layers_.incoming()) {
    inputs.push_back(mailbox_.receive_forward(
        skip_spec(name, b, true), b, stage_, skips_.at(name).from_stage)[0]);
  }
  return inputs;
}

void Pipeline::send_outputs(const Tensors& outputs, int b) {
  if (is_last()) {
    // The loss: it is read when the mini-batch is done, and travels then
    losses_[b] = outputs[0].detach();
    losses_[b].set_memory_kind(MemoryKind::kCommunication);
    return;
  }
  const auto skips_begin =
      outputs.end() - static_cast<std::ptrdiff_t>(layers_.outgoing().size());
  mailbox_.send_forward({outputs.begin(), skips_begin}, b, stage_ + 1,
                        stage_ + 1);
  // Past the stages in between
  for (std::size_t i = 0; i < layers_.outgoing().size(); ++i) {
    const int to = skips_.at(layers_.outgoing()[i]).to_stage;
    mailbox_.send_forward({skips_begin[static_cast<std::ptrdiff_t>(i)]}, b, to,
                          to);
  }
}

Tensors Pipeline::receive_gradients(int b) {
  if (is_last()) {
    // The share of these rows in the mean over the mini-batch
    return {Tensor::full({}, share(b), losses_.at(b).options())};
  }
  Tensors grads =
      mailbox_.receive_backward(output_spec(b), b, stage_ + 1, stage_ + 1);
  for (const std::string& name : layers_.outgoing()) {
    const int from = skips_.at(name).to_stage;
    grads.push_back(
        mailbox_.receive_backward(skip_spec(name, b, false), b, from, from)[0]);
  }
  return grads;
}

void Pipeline::send_gradients(const Tensors& grads, int b) {
  if (is_first()) return;
  const auto skips_begin =
      grads.end() - static_cast<std::ptrdiff_t>(layers_.incoming().size());
  mailbox_.send_backward({grads.begin(), skips_begin}, input_spec(b), b, stage_,
                         stage_ - 1);
  for (std::size_t i = 0; i < layers_.incoming().size(); ++i) {
    const std::string& name = layers_.incoming()[i];
    mailbox_.send_backward({skips_begin[static_cast<std::ptrdiff_t>(i)]},
                           skip_spec(name, b, true), b, stage_,
                           skips_.at(name).from_stage);
  }
}

double Pipeline::predicted_bytes() const {
  double bytes = 0;
  for (int b = 0; b < num_micro_batches(); ++b) {
    if (!is_last()) bytes += forward_bytes(output_spec(b));
    if (!is_first()) bytes += backward_bytes(input_spec(b));
    for (const std::string& name : layers_.outgoing()) {
      bytes += forward_bytes(skip_spec(name, b, false));
    }
    for (const std::string& name : layers_.incoming()) {
      bytes += backward_bytes(skip_spec(name, b, true));
    }
  }
  return bytes;
}

// --- Shapes ------------------------------------------------------------------

double Pipeline::share(int b) const {
  return static_cast<double>(pieces_[static_cast<std::size_t>(b)].rows) / rows_;
}

const LayerInput& Pipeline::input_spec(int b) const {
  const std::int64_t rows = pieces_[static_cast<std::size_t>(b)].rows;
  const int layer = model_.layout().cuts[static_cast<std::size_t>(stage_)];
  return shapes_.at(rows)[static_cast<std::size_t>(layer)];
}

const LayerInput& Pipeline::output_spec(int b) const {
  const std::int64_t rows = pieces_[static_cast<std::size_t>(b)].rows;
  const int layer = model_.layout().cuts[static_cast<std::size_t>(stage_) + 1];
  return shapes_.at(rows)[static_cast<std::size_t>(layer)];
}

LayerInput Pipeline::skip_spec(const std::string& name, int b,
                               bool is_incoming) const {
  LayerInput spec;
  spec.values = {(is_incoming ? input_spec(b) : output_spec(b)).skips.at(name)};
  return spec;
}

}  // namespace shardbook::gpipe
