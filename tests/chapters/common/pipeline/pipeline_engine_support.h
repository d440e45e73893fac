#pragma once

// Small models for tests of pipeline engines, and one device for comparison.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "comm/launch.h"
#include "core/autograd.h"
#include "core/ops.h"

namespace shardbook::pipeline_test {

using Values = std::map<std::string, std::vector<double>>;
constexpr std::int64_t kVocab = 13, kWidth = 6;
constexpr int kLayers = 9;

/// Maps (x, tokens) to (x', tokens): integers without a gradient travel with
/// the activations.
class PairLayer : public ModuleOf<PairLayer> {
 public:
  enum class Kind { kEmbedding, kLinear, kRelu, kHead };
  PairLayer(Kind kind, std::string name, const InitOptions& init)
      : kind_(kind), name_(std::move(name)), drop_(0.25) {
    if (kind == Kind::kEmbedding) {
      weight_ = make_parameter(name_ + ".weight", {kVocab, kWidth}, 0.5, init);
    } else if (kind != Kind::kRelu) {
      const std::int64_t out = kind == Kind::kHead ? kVocab : kWidth;
      weight_ = make_parameter(name_ + ".weight", {kWidth, out}, 0.5, init);
      bias_ = make_parameter(name_ + ".bias", {out}, 0.5, init);
    }
  }
  Tensors forward_all(const Tensors& in) override {
    switch (kind_) {
      case Kind::kEmbedding:
        return {embedding(weight_, in[0]), in[0]};
      case Kind::kLinear: {
        // The output depends on the tokens, so wrong tokens are noticed
        const Tensor y = linear(in[0], weight_, bias_);
        return {
            drop_(add(y, scale(embedding(token_vectors(in[1]), in[1]), 0.125))),
            in[1]};
      }
      case Kind::kRelu:
        return {relu(in[0]), in[1]};
      default:
        return {linear(in[0], weight_, bias_)};
    }
  }
  void members(MemberVisitor& visit) override {
    if (weight_.defined()) visit.parameter(name_ + ".weight", weight_);
    if (bias_.defined()) visit.parameter(name_ + ".bias", bias_);
    visit.module(name_ + ".drop", drop_);
  }

 private:
  Tensor token_vectors(const Tensor& tokens) const {
    return Tensor::full({kVocab, kWidth}, 0.5,
                        {weight_.dtype(), tokens.device()});
  }
  Kind kind_;
  std::string name_;
  Tensor weight_, bias_;
  Dropout drop_;
};

/// Nine layers or more, two of them without parameters.
class PairLayers : public LayerList {
 public:
  explicit PairLayers(int size = kLayers) : size_(size) {}
  int size() const override { return size_; }
  std::string name(int layer) const override {
    return "layer" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    using Kind = PairLayer::Kind;
    const Kind kind = layer == 0                 ? Kind::kEmbedding
                      : layer == size_ - 1       ? Kind::kHead
                      : layer == 3 || layer == 6 ? Kind::kRelu
                                                 : Kind::kLinear;
    return std::make_unique<PairLayer>(kind, name(layer), init);
  }

 private:
  int size_;
};

inline Options small_options(std::int64_t batch, DType dtype = DType::kF32) {
  Options options;
  options.dtype = dtype;
  options.data = "random";
  options.batch = batch;
  options.seq = 3;
  options.seed = 5;
  options.cluster = "none";
  return options;
}

inline Dataset small_data(const Options& options) {
  return Dataset::open("random", options.seq, kVocab, options.seed);
}

inline void add_grads(Module& module, Values& grads) {
  for (const NamedTensor& each : module.named_parameters()) {
    if (each.tensor.grad().defined()) {
      grads[each.name] = each.tensor.grad().to_vector<double>();
    }
  }
}

struct Outcome {
  double loss = 0;
  double evaluated = 0;  ///< by forwards alone, after the run
  /// Messages with gradients in that evaluation.
  std::int64_t gradients_evaluating = 0;
  std::map<int, double> losses;  ///< by micro-batch
  Values grads;
  int live = 0;
  double predicted = 0, counted = 0;  ///< bytes between stages
  /// "send 36 to 1: activations micro-batch 0 stage 1", in order.
  std::vector<std::string> messages;
};

inline RandomState random_of(const Options& options) {
  RandomState random;
  random.seed = options.seed;
  return random;
}

/// One device: micro-batches in this order.
inline Outcome on_one_device(const LayerList& layers, const Options& options,
                             const std::vector<MicroBatch>& pieces,
                             const std::vector<int>& order) {
  RankContext context(Device::cpu(0), 0, 1);
  context.deterministic = true;
  const RankContext::Scope scope(context);
  context.random = random_of(options);
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  Stage model(layers, 0, layers.size(), init);
  const Dataset data = small_data(options);
  pipeline::LanguageFeed feed(options, data, pieces);
  Outcome outcome;
  for (const int b : order) {
    const pipeline::Piece piece = feed.piece(b);
    context.random.batch = piece.slice;
    context.random.next_op = 0;
    const Tensor loss = feed.loss(b, model(feed.inputs(b)));
    outcome.losses[b] = loss.item() * piece.share;
    autograd::backward({loss}, {Tensor::full({}, piece.share, loss.options())});
  }
  for (const auto& [b, loss] : outcome.losses) outcome.loss += loss;
  add_grads(model, outcome.grads);
  return outcome;
}

inline std::vector<int> ascending(int m) {
  std::vector<int> order;
  for (int b = 0; b < m; ++b) order.push_back(b);
  return order;
}

/// Runs the schedule on ranks. Returns each rank's gradients, with the shared
/// ones summed.
inline std::vector<Outcome> on_ranks(
    const pipeline::Schedule& schedule,
    const std::shared_ptr<const LayerList>& layers,
    const std::vector<int>& cuts, const Options& options,
    const std::vector<MicroBatch>& pieces, const std::string& backend = "") {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(schedule.num_ranks));
  LaunchOptions launch;
  launch.deterministic = true;
  launch.timeout = std::chrono::seconds(60);
  run_ranks(
      schedule.num_ranks,
      [&](ProcessGroup& world) {
        RankContext::current().random = random_of(options);
        Outcome& mine = outcomes[static_cast<std::size_t>(world.rank())];
        const Dataset data = small_data(options);
        pipeline::LanguageFeed feed(options, data, pieces);
        PipelineModel model(options, layers,
                            pipeline::layout_of(schedule, cuts), world);
        pipeline::Engine engine(schedule, model, world, feed);
        mine.loss = engine.run();
        mine.live = engine.max_live();
        mine.predicted = engine.predicted_bytes();
        mine.counted = wire_bytes(world.records());
        for (const CommRecord& each : world.records()) {
          const bool is_send = each.op == CommOp::kSend;
          if (!is_send && each.op != CommOp::kRecv) continue;
          mine.messages.push_back(
              (is_send ? "send " : "recv ") + std::to_string(each.numel) +
              (is_send ? " to " : " from ") +
              std::to_string(each.root_or_peer) + ": " + each.label);
        }
        const int last = schedule.num_stages - 1;
        for (int b = 0; b < schedule.num_micro_batches; ++b) {
          if (schedule.place(b, last).rank == world.rank()) {
            mine.losses[b] = engine.loss(b);
          }
        }
        world.clear_records();
        mine.evaluated = schedule.flushes ? engine.evaluate() : mine.loss;
        for (const CommRecord& each : world.records()) {
          mine.gradients_evaluating += each.label.rfind("gradients", 0) == 0;
        }
        model.reduce_shared_gradients();
        for (int s = 0; s < schedule.num_stages; ++s) {
          if (model.holds(s)) add_grads(model.stage(s), mine.grads);
        }
      },
      launch);
  return outcomes;
}

/// The gradients of all ranks in one map; ranks with the same stage must agree.
inline Outcome together(const std::vector<Outcome>& outcomes,
                        bool* agree = nullptr) {
  Outcome all;
  if (agree != nullptr) *agree = true;
  for (const Outcome& each : outcomes) {
    all.loss += each.loss;
    all.losses.insert(each.losses.begin(), each.losses.end());
    for (const auto& [name, values] : each.grads) {
      const auto [found, is_new] = all.grads.emplace(name, values);
      if (!is_new && found->second != values && agree != nullptr) {
        *agree = false;
      }
    }
  }
  return all;
}

/// Largest |a - b| / max(1, |b|), infinite when names or sizes differ.
inline double largest_difference(const Values& a, const Values& b) {
  if (a.size() != b.size()) return 1e300;
  double worst = 0;
  for (const auto& [name, values] : b) {
    const auto found = a.find(name);
    if (found == a.end() || found->second.size() != values.size()) return 1e300;
    for (std::size_t i = 0; i < values.size(); ++i) {
      worst = std::max(worst, std::abs(found->second[i] - values[i]) /
                                  std::max(1.0, std::abs(values[i])));
    }
  }
  return worst;
}

}  // namespace shardbook::pipeline_test
