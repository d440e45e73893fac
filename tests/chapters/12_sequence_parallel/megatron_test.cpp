// Megatron's sequence parallelism against one device and tensor parallelism.

#include "chapters/12_sequence_parallel/megatron.h"

#include <map>

#include "chapters/common/sharded/sharded_strategy.h"
#include "core/check.h"
#include "tests/chapters/12_sequence_parallel/sequence_support.h"
#include "tests/support/larger.h"

namespace shardbook::sequence_parallel {
namespace {

struct GptSizes {
  std::int64_t batch = 2, sequence = 24, h = 24, heads = 24, layers = 2;
  double dropout = 0;
  DType dtype = DType::kF64;
};

ModelConfig config_of(const GptSizes& sizes) {
  ModelConfig config;
  config.vocab_size = 48;
  config.n_positions = sizes.sequence + 2;
  config.n_embd = sizes.h;
  config.n_layer = sizes.layers;
  config.n_head = sizes.heads;
  config.dropout = sizes.dropout;
  return config;
}

using Values = std::map<std::string, std::vector<double>>;
struct Result {
  double loss = 0;
  Values gradients;
  std::vector<CommRecord> records;
};

using Finish = std::function<void(const std::vector<NamedTensor>&)>;

Result run_gpt(const GptSizes& sizes, const LayerFactory& layers,
               const Finish& finish = nullptr) {
  InitOptions init;
  init.seed = 5;
  init.dtype = sizes.dtype;
  ContextValue<RandomState> state(&RankContext::random,
                                  RandomState{3, 1, 0, {2, 3}});
  const auto ids = [&](std::uint64_t seed) {
    return to_dtype(noise({sizes.batch, sizes.sequence}, seed, 0, 47.99),
                    DType::kI64);
  };
  Gpt model(config_of(sizes), init, layers);
  const Tensor loss = layers.loss(model(ids(7)), ids(8));
  {
    PhaseScope phase(Phase::kBackward);
    loss.backward();
  }
  if (finish) finish(model.named_parameters());
  Result result;
  result.loss = loss.item();
  for (const NamedTensor& each : model.named_parameters()) {
    result.gradients[each.name] = each.tensor.grad().to_vector<double>();
  }
  return result;
}

Finish sum_partial(ProcessGroup& tp) {
  return [&tp](const std::vector<NamedTensor>& parameters) {
    Tensors partial;
    for (const NamedTensor& each : parameters) {
      if (has_partial_gradient(each.name)) partial.push_back(each.tensor);
    }
    sum_gradients(tp, partial, "sequence_parallel");
  };
}

std::vector<Result> run_cut(int t, const GptSizes& sizes,
                            const MegatronOptions& setup = {}) {
  return on_ranks(t, [&](ProcessGroup& world) {
    Result result =
        run_gpt(sizes, megatron_layers(config_of(sizes), world, setup),
                sum_partial(world));
    result.records = world.records();
    return result;
  });
}

/// The largest difference between rank `rank`'s gradients and its parts of one
/// device's.
double worst_gradient(const Result& found, const GptSizes& sizes,
                      const Result& expected, int rank, int t) {
  InitOptions init;
  Gpt shapes(config_of(sizes), init);
  double largest = 0;
  for (const NamedTensor& each : shapes.named_parameters()) {
    const Tensor whole = Tensor::from_values<double>(
        expected.gradients.at(each.name), each.tensor.shape());
    const auto part =
        take_part(whole,
                  tensor_parallel::layout(config_of(sizes), each.name, rank, t))
            .to_vector<double>();
    largest = larger(largest, largest_gap(found.gradients.at(each.name), part));
  }
  return largest;
}

class MegatronSequence : public testing::TestWithParam<int> {};

TEST_P(MegatronSequence, EqualsOneDevice) {
  const int t = GetParam();
  for (double dropout : {0.0, 0.2}) {
    for (bool recompute : {false, true}) {
      GptSizes sizes;
      sizes.dropout = dropout;
      const Result expected = run_gpt(sizes, LayerFactory());
      const auto found = run_cut(t, sizes, {recompute});
      for (int rank = 0; rank < t; ++rank) {
        const Result& own = found[static_cast<std::size_t>(rank)];
        EXPECT_NEAR(own.loss, expected.loss, 1e-12);
        EXPECT_LT(worst_gradient(own, sizes, expected, rank, t), 1e-11);
      }
    }
  }
}

TEST_P(MegatronSequence, ReplicasHaveTheSameBits) {
  const auto found = run_cut(GetParam(), GptSizes());
  for (const auto& [name, gradient] : found[0].gradients) {
    const ModelConfig config = config_of(GptSizes());
    if (!tensor_parallel::layout(config, name, 0, GetParam()).empty()) continue;
    for (const Result& other : found) {
      EXPECT_EQ(other.gradients.at(name), gradient) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MegatronSequence,
                         testing::Values(1, 2, 3, 4, 8));

TEST(MegatronSequenceBytes, GoldenLogOfALayer) {
  // t = 4, s = 8, b = 2, h = 16: every call moves 256 and sends 192 of them; a
  // block has 4 forward and 6 backward, 768 and 1152
  GptSizes sizes;
  sizes.sequence = 8, sizes.h = 16, sizes.heads = 4, sizes.layers = 1;
  const auto found = run_cut(4, sizes);
  const std::vector<std::string> expected = {
      "forward reduce_scatter",                        // embedding
      "forward all_gather", "forward reduce_scatter",  // attention
      "forward all_gather", "forward reduce_scatter",  // MLP
      "forward all_gather",                            // head
      "backward reduce_scatter",
      // dY, X once more, dX
      "backward all_gather", "backward all_gather", "backward reduce_scatter",
      "backward all_gather", "backward all_gather", "backward reduce_scatter",
      "backward all_gather"};
  for (const Result& result : found) {
    std::vector<std::string> calls;
    for (const CommRecord& record : result.records) {
      if (record.op == CommOp::kAllReduce) continue;  // loss, partial gradients
      EXPECT_EQ(record.numel, 256);
      EXPECT_EQ(wire_elements(record), 192);
      calls.push_back(std::string(phase_name(record.phase)) + " " +
                      comm_op_name(record.op));
    }
    EXPECT_EQ(calls, expected);
  }
}

std::vector<std::string> op_names(const ProcessGroup& group) {
  std::vector<std::string> names;
  for (const CommRecord& record : group.records()) {
    names.push_back(comm_op_name(record.op));
  }
  return names;
}

// A recomputed block repeats its gathers and scatters, too.
TEST(MegatronSequenceBytes, ARecomputedBlockRepeatsItsCollectives) {
  struct Block {
    std::vector<std::string> calls;
    std::vector<double> dx;
  };
  const auto backward_of = [](bool recompute) {
    return on_ranks(2, [recompute](ProcessGroup& tp) {
      const GptSizes sizes;
      InitOptions init;
      init.seed = 5;
      init.dtype = DType::kF64;
      GptBlock block("transformer.h.0", config_of(sizes), init,
                     megatron_layers(config_of(sizes), tp));
      block.recompute = recompute;
      const auto rank = static_cast<std::uint64_t>(tp.rank());
      const Tensor x = noise({2, 12, 24}, 1 + rank).set_requires_grad();
      const Tensor y = block(x);
      tp.clear_records();
      autograd::backward({y}, {noise(y.shape(), 4 + rank)});
      return Block{op_names(tp), x.grad().to_vector<double>()};
    })[0];
  };
  // Twice: dY, X once more, dX
  const std::vector<std::string> once = {"all_gather",     "all_gather",
                                         "reduce_scatter", "all_gather",
                                         "all_gather",     "reduce_scatter"};
  std::vector<std::string> again = {"all_gather", "reduce_scatter",
                                    "all_gather", "reduce_scatter"};
  again.insert(again.end(), once.begin(), once.end());
  const Block kept = backward_of(false), recomputed = backward_of(true);
  EXPECT_EQ(kept.calls, once);
  EXPECT_EQ(recomputed.calls, again);
  EXPECT_EQ(recomputed.dx, kept.dx);
}

// An input that needs no gradient causes no communication for it.
TEST(MegatronSequenceBytes, AFrozenWeightIsNotGatheredFor) {
  const auto calls_of = [](bool of_x, bool of_weight) {
    return on_ranks(2, [&](ProcessGroup& tp) {
      Tensor x = noise({3, 4, 6}, 1), weight = noise({6, 5}, 2);
      x.set_requires_grad(of_x);
      weight.set_requires_grad(of_weight);
      const Tensor bias = noise({5}, 3).set_requires_grad();
      const Tensor y = gathered_linear(x, weight, bias, tp);
      tp.clear_records();
      autograd::backward({y}, {noise(y.shape(), 4 + tp.rank())});
      const std::vector<std::string> calls = op_names(tp);
      // The other gradients are as if all were needed
      Tensor free = noise({6, 5}, 2).set_requires_grad();
      Tensor own = noise({3, 4, 6}, 1).set_requires_grad();
      const Tensor expected = gathered_linear(own, free, bias.detach(), tp);
      autograd::backward({expected}, {noise(y.shape(), 4 + tp.rank())});
      SB_CHECK(!of_x || values(x.grad()) == values(own.grad()), "dx differs");
      SB_CHECK(!of_weight || values(weight.grad()) == values(free.grad()),
               "dweight differs");
      return calls;
    })[0];
  };
  using Calls = std::vector<std::string>;
  EXPECT_EQ(calls_of(true, true), (Calls{"all_gather", "reduce_scatter"}));
  EXPECT_EQ(calls_of(true, false), Calls{"reduce_scatter"});
  EXPECT_EQ(calls_of(false, true), Calls{"all_gather"});
  EXPECT_EQ(calls_of(false, false), Calls{});
}

}  // namespace
}  // namespace shardbook::sequence_parallel
