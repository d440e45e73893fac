// One layer of experts with numbers: two ranks with four tokens each, and one
// expert on each rank, as in the page's PyTorch lines.
//
//   ./shardbook toy moe

#include <fmt/format.h>

#include <string>
#include <vector>

#include "chapters/13_moe/dispatch.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"
#include "core/ops.h"

using namespace shardbook;

constexpr int kRanks = 2, kTokens = 4, kExperts = 2, kWidth = 2;

/// The tokens of a rank.
Tensor tokens_of(int rank) {
  return rank == 0 ? Tensor::from_values<float>({3, 1, 1, 2, 2, 0, 1, 4},
                                                {kTokens, kWidth})
                   : Tensor::from_values<float>({5, 1, 2, 1, 3, 2, 0, 1},
                                                {kTokens, kWidth});
}

/// Top-1. The logits are the tokens themselves, and of the tokens that choose
/// an expert, the first two keep their slots.
moe::GateResult route(const Tensor& x) {
  moe::GateOptions options;
  options.num_experts = kExperts;
  options.min_capacity = 1;
  options.use_rts = false;
  moe::TopKGate gate("gate", kWidth, options, {});
  gate.weight.copy_from(
      Tensor::from_values<float>({1, 0, 0, 1}, {kWidth, kExperts}));
  moe::GateCall call;
  call.name = "gate";
  return gate.route(x, call);
}

/// Expert e multiplies by e + 2: [E, 1, 1] of the experts `first` to `last` - 1.
Tensor experts(int first, int last) {
  std::vector<float> scales;
  for (int e = first; e < last; ++e)
    scales.push_back(static_cast<float>(e + 2));
  return Tensor::from_values(scales, {last - first, 1, 1}).set_requires_grad();
}

std::string rows_text(const Tensor& rows) {
  const std::vector<double> values = rows.to_vector<double>();
  std::string text;
  for (std::size_t i = 0; i < values.size(); i += kWidth) {
    text += fmt::format("   {:.0f} {:.0f}", values[i], values[i + 1]);
  }
  return text;
}

std::string choices_text(const Tensor& x, const moe::GateResult& gate) {
  std::string text = "token  expert  weight  slot\n";
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t slot = gate.routing.slot[moe::at(t)];
    text += fmt::format("{}  {:6}  {:.4f}  {}\n",
                        rows_text(x.rows_view(t, t + 1)).substr(1),
                        gate.routing.expert[moe::at(t)],
                        gate.weights.to_vector<double>()[moe::at(t)],
                        slot < 0 ? "none: dropped" : fmt::to_string(slot));
  }
  return text;
}

/// Loss and gradient of each rank's expert, by slots and all-to-alls.
Tensors on_ranks() {
  Tensors losses(kRanks), gradients(kRanks);
  run_ranks(kRanks, [&](ProcessGroup& ep) {
    const Tensor x = tokens_of(ep.rank());
    const Tensor scale = experts(ep.rank(), ep.rank() + 1);
    const moe::GateResult gate = route(x);
    // 1. To the slots, to the experts, and back
    const Tensor here = moe::to_experts(moe::dispatch(x, gate.routing), &ep);
    const Tensor back = moe::from_experts(mul(scale, here), &ep, kExperts);
    // 2. The weighted results; backward sends gradients the same way
    const Tensor loss = sum(moe::combine(back, gate.routing, gate.weights));
    loss.backward();
    // 3. What each rank has to say
    for (const std::string& text :
         {fmt::format("rank {}\n{}", ep.rank(), choices_text(x, gate)),
          fmt::format("slots of expert {}, two for each rank:{}\n", ep.rank(),
                      rows_text(here)),
          fmt::format("loss of rank {} {:.6f}\n", ep.rank(), loss.item()),
          fmt::format("gradient of expert {} {:.6f}\n", ep.rank(),
                      scale.grad().item())}) {
      toy::print_in_order(ep, text);
    }
    losses[moe::at(ep.rank())] = loss.detach();
    gradients[moe::at(ep.rank())] = scale.grad();
  });
  return {losses[0], losses[1], gradients[0], gradients[1]};
}

/// The same on one device, by products with masks of zeros and ones.
Tensors on_one_device() {
  Tensors losses;
  const Tensor scales = experts(0, kExperts);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Tensor x = tokens_of(rank);
    const moe::GateResult gate = route(x);
    const Tensor results = mul(scales, moe::naive_dispatch(x, gate.routing));
    const Tensor loss =
        sum(moe::naive_combine(results, gate.routing, gate.weights));
    loss.backward();
    losses.push_back(loss.detach());
  }
  return {losses[0], losses[1], scales.grad().rows_view(0, 1),
          scales.grad().rows_view(1, 2)};
}

int main() { return toy::compare(on_ranks(), on_one_device()); }
