// Mixture of experts on one screen: every token visits one of twelve experts.
// One all-to-all brings tokens to their ranks, one takes results back.
//
//   ./shardbook lesson moe
// Needed: 03_zero_fsdp, 07_tensor_parallel. Next: 14_hybrid_3d.

#include "chapters/common/lesson.h"
#include "chapters/13_moe/moe_strategy.h"

namespace shardbook::moe {

constexpr int kExperts = 12;

// --- the strategy
/// Piece j of x goes to rank j. The gradient goes back the same way.
inline Tensor exchange(const Tensor& x, ProcessGroup& ep) {
  const auto all_to_all = [&ep](const Tensors& in) {
    const Tensor out = in[0].empty_like();
    ep.all_to_all(out, in[0]).wait();
    return Tensors{out};
  };
  return autograd::custom_function("exchange", {x}, all_to_all, all_to_all)[0];
}

/// Sends x [T, M] through the experts of all ranks; `experts`, those of this
/// rank, map [E/d, rows, M] to the same.
inline Tensor dispatch_and_combine(const Tensor& x, const Tensor& gate,
                                   Module& experts, ProcessGroup& ep) {
  const std::int64_t d = ep.size(), local = kExperts / d;
  const std::int64_t t = x.size(0), m = x.size(1);
  // The gate: a probability per expert; each token takes the most likely one
  const Tensor probabilities = softmax(matmul(x, gate));
  const Tensor chosen = lesson::one_hot_of_largest(probabilities);
  // Dispatch: a slot per expert and token, zeros where it is not chosen
  const Tensor by_expert = reshape(transpose(chosen, 0, 1), {kExperts, t, 1});
  Tensor slots = mul(by_expert, reshape(x, {1, t, m}));
  // From the order of sources to the order of experts, and back
  slots = reshape(exchange(slots, ep), {d, local, t, m});
  slots = reshape(transpose(slots, 0, 1), {local, d * t, m});
  Tensor results = reshape(experts(slots), {local, d, t, m});
  results = exchange(reshape(transpose(results, 0, 1), {kExperts, t, m}), ep);
  // Combine: the weight of a result is its probability, so the gate learns
  const Tensor weights = transpose(mul(probabilities, chosen), 0, 1);
  return sum(mul(reshape(weights, {kExperts, t, 1}), results), 0);
}

/// An expert's gradient is a sum over the tokens of all ranks already.
inline void average_gradients(Module& model, ProcessGroup& dp) {
  for (const auto& [name, parameter] : model.named_parameters()) {
    scale_into(parameter.grad(), parameter.grad(), 1.0 / dp.size());
    if (!is_expert(name)) dp.all_reduce(parameter.grad()).wait();
  }
}
// --- end

struct ExpertLayer : ModuleOf<ExpertLayer> {
  ExpertLayer(const Tensor& gate, const Experts& experts, ProcessGroup& ep)
      : gate(gate), experts(experts), ep(ep) {}
  Tensor forward(const Tensor& x) override {
    const Tensor rows = reshape(x, {-1, x.size(-1)});
    return reshape(dispatch_and_combine(rows, gate, experts, ep), x.shape());
  }
  void members(MemberVisitor& visit) override {
    visit.parameter("gate.weight", gate), visit.module("experts", experts);
  }
  Tensor gate;
  Experts experts;
  ProcessGroup& ep;
};

inline lesson::Result train(ProcessGroup& dp) {
  // 1. A GPT with experts in the place of its MLPs; this rank has 1/d of them
  LayerFactory layers;
  layers.mlp = [&dp](auto& name, auto& config, auto& init, auto&) {
    const ExpertsShape e = {kExperts, config.n_embd, 4 * config.n_embd, 0.02,
                            residual_stddev(config)};
    return AnyModule(std::make_unique<ExpertLayer>(
        make_parameter(name + ".gate.weight", {e.width, kExperts}, 0.02, init),
        Experts(name + ".experts", e, init, dp.rank(), dp.size(), nullptr),
        dp));
  };
  Gpt model(lesson::config(), lesson::init(), layers);
  const auto optimizer = lesson::sgd(model.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Its own samples; tokens travel inside of the model
    const Batch batch = lesson::batch(step, dp.rank(), dp.size());
    const Tensor mean = language_loss(model(batch.inputs), batch.targets);
    mean.backward();
    average_gradients(model, dp);
    optimizer->step();
    model.clear_grad();
    loss = lesson::mean_over(mean, dp);
  }
  const auto layout = [&](const std::string& name, int r) {
    return expert_layout(name, r, dp.size(), 0, 1);
  };
  return lesson::count(dp, loss).with(
      lesson::join(model.named_parameters(), layout, dp));
}

/// Ten steps send four all-to-alls per block, of n slots, and the sums of DDP.
inline double bill(int /*rank*/, int d) {
  const double h = lesson::config().n_embd, n = kExperts * lesson::num_tokens();
  const double gates_for_mlps = 4 * (kExperts * h - 8 * h * h - 5 * h);
  const double whole = lesson::num_parameters() + gates_for_mlps + 1;  // loss
  return lesson::kSteps * (16 * n / d * h + 2 * whole) * (d - 1) / d * 8;
}

inline lesson::Lesson this_lesson() {
  const auto alone = [] { return train_dropless(lesson::options(), kExperts); };
  return {/*ranks=*/{4, 2}, train, bill, alone};
}

}  // namespace shardbook::moe

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::moe::this_lesson()); }
#endif
