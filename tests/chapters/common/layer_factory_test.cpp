// Layers of GPT are replaced through the factory: sharded ones begin with the
// weights of the whole ones, compute what those compute and draw their masks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/training.h"
#include "comm/launch.h"
#include "core/autograd.h"

namespace shardbook {
namespace {

/// This rank's columns of a Linear; the outputs are gathered.
class ColumnLinear : public ModuleOf<ColumnLinear> {
 public:
  ColumnLinear(const std::string& name, std::int64_t in, std::int64_t out,
               double stddev, InitOptions init, ProcessGroup& tp)
      : tp_(&tp) {
    init.shards = {{1, tp.rank(), tp.size()}};
    weight = make_parameter(name + ".weight", {in, out}, stddev, init);
    init.shards[0].dim = 0;
    bias = make_constant_parameter({out}, 0, init);
  }
  Tensor forward(const Tensor& x) override {
    const Tensor own = reshape(linear(x, weight, bias), {-1, weight.size(1)});
    Tensor all =
        Tensor::empty({tp_->size() * own.size(0), own.size(1)}, own.options());
    tp_->all_gather(all, own).wait();
    Shape shape = x.shape();
    shape.back() = tp_->size() * weight.size(1);
    // [ranks, rows, columns] -> [rows, ranks, columns]
    return reshape(
        transpose(reshape(all, {tp_->size(), own.size(0), own.size(1)}), 0, 1),
        shape);
  }
  void members(MemberVisitor& visit) override {
    visit.parameter("weight", weight);
    visit.parameter("bias", bias);
  }

  Tensor weight, bias;

 private:
  ProcessGroup* tp_;
};

ModelConfig two_layers() {
  ModelConfig config;
  config.n_layer = 2;
  return config;
}

TEST(LayerFactory, ALinearOverTwoRanksBeginsAsOnOneDevice) {
  const ModelConfig config = two_layers();
  InitOptions init;
  init.seed = 5;
  run_ranks(2, [&](ProcessGroup& tp) {
    const NoGrad no_grad;
    Gpt whole(config, init);
    LayerFactory layers;
    layers.linear = [&](const std::string& name, std::int64_t in,
                        std::int64_t out, double stddev,
                        const InitOptions& init) -> AnyModule {
      return {std::make_unique<ColumnLinear>(name, in, out, stddev, init, tp)};
    };
    Gpt sharded(config, init, layers);

    // Under the same names, and bit for bit
    const auto mine = sharded.named_parameters();
    const auto theirs = whole.named_parameters();
    ASSERT_EQ(mine.size(), theirs.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].name, theirs[i].name);
      const Tensor& part = mine[i].tensor;
      Tensor expected = theirs[i].tensor;
      if (part.shape() != expected.shape()) {
        const std::int64_t dim = part.ndim() - 1, own = part.size(-1);
        expected = slice(expected, dim, tp.rank() * own, (tp.rank() + 1) * own);
      }
      EXPECT_TRUE(bitwise_equal(part, expected)) << mine[i].name;
    }

    Tensor tokens = Tensor::empty({2, 8}, {DType::kI64, Device()});
    for (std::int64_t i = 0; i < 16; ++i) {
      tokens.data<std::int64_t>()[i] = 7 * i % config.vocab_size;
    }
    EXPECT_LT(max_abs_difference(sharded(tokens), whole(tokens)), 1e-5);
  });
}

// Queries, keys and values are three blocks, each of which is cut.
TEST(LayerFactory, AShardOfThreeBlocksTakesAPartOfEach) {
  InitOptions init;
  const Tensor whole = make_parameter("w", {4, 12}, 1, init);
  for (int index = 0; index < 2; ++index) {
    InitOptions part_init;
    part_init.shards = {{1, index, 2, 3}};
    const Tensor part = make_parameter("w", {4, 12}, 1, part_init);
    ASSERT_EQ(part.shape(), (Shape{4, 6}));
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t block = 0; block < 3; ++block) {
        for (std::int64_t i = 0; i < 2; ++i) {
          EXPECT_EQ(part.data<float>()[row * 6 + block * 2 + i],
                    whole.data<float>()[row * 12 + block * 4 + index * 2 + i]);
        }
      }
    }
  }
  InitOptions odd;
  odd.shards = {{1, 0, 5}};
  EXPECT_THROW(make_parameter("w", {4, 12}, 1, odd), Error);
}

// --- Loss --------------------------------------------------------------------

/// Identity whose backward adds the gradients of the ranks: the input of layers
/// that are cut by their outputs.
Tensor copied_to(const Tensor& x, ProcessGroup& tp) {
  Tensor y = x.clone();
  autograd::record("copied_to", {x}, {y}, [&tp](const Tensors& grads) {
    Tensor sum = grads[0].clone();
    tp.all_reduce(sum, ReduceOp::kSum).wait();
    return Tensors{sum};
  });
  return y;
}

/// Cross-entropy of logits whose vocabulary is cut over the ranks, in f64:
/// log(sum of exp z) - z[target], where the ranks' maxima, sums and target
/// logits are reduced. Megatron-LM (Shoeybi et al. 2019), section 3.
Tensor vocabulary_parallel_loss(const Tensor& logits, const Tensor& targets,
                                ProcessGroup& tp) {
  const std::int64_t own = logits.size(-1), rows = targets.numel();
  const std::int64_t first = tp.rank() * own;
  const TensorOptions f64{DType::kF64, Device()};
  const double* z = logits.data<double>();
  const std::int64_t* target = targets.data<std::int64_t>();
  const auto is_own = [=](std::int64_t row) {
    return target[row] >= first && target[row] < first + own;
  };
  Tensor largest = Tensor::zeros({rows}, f64),
         sums = Tensor::zeros({rows}, f64), hits = Tensor::zeros({rows}, f64);
  for (std::int64_t i = 0; i < rows; ++i) {
    largest.data<double>()[i] =
        *std::max_element(z + i * own, z + i * own + own);
  }
  tp.all_reduce(largest, ReduceOp::kMax).wait();
  Tensor softmax = logits.empty_like();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = i * own; j < i * own + own; ++j) {
      softmax.data<double>()[j] = std::exp(z[j] - largest.data<double>()[i]);
      sums.data<double>()[i] += softmax.data<double>()[j];
    }
    if (!is_own(i)) continue;
    hits.data<double>()[i] =
        z[i * own + target[i] - first] - largest.data<double>()[i];
  }
  tp.all_reduce(sums, ReduceOp::kSum).wait();
  tp.all_reduce(hits, ReduceOp::kSum).wait();
  Tensor loss = Tensor::zeros({}, f64);
  for (std::int64_t i = 0; i < rows; ++i) {
    *loss.data<double>() +=
        (std::log(sums.data<double>()[i]) - hits.data<double>()[i]) /
        static_cast<double>(rows);
  }
  autograd::record(
      "vocabulary_parallel_loss", {logits}, {loss}, [=](const Tensors& grads) {
        const double share = grads[0].item() / static_cast<double>(rows);
        Tensor gradient = softmax.empty_like();
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < own; ++j) {
            const double p =
                softmax.data<double>()[i * own + j] / sums.data<double>()[i];
            const bool hit = target[i] == first + j;
            gradient.data<double>()[i * own + j] = share * (p - (hit ? 1 : 0));
          }
        }
        return Tensors{gradient};
      });
  return loss;
}

Options small_batches() {
  Options options;
  options.batch = 4;
  options.seq = 8;
  return options;
}

// One device adds the same numbers in another order.
constexpr double kSameSum = 1e-12;

TEST(LayerFactory, ALossOverTwoRanksOfTheVocabularyIsThatOfOneDevice) {
  const ModelConfig config = two_layers();
  const Options options = small_batches();
  InitOptions init;
  init.seed = 5;
  init.dtype = DType::kF64;
  run_ranks(2, [&](ProcessGroup& tp) {
    const Dataset data =
        Dataset::open("walk", options.seq, config.vocab_size, 1);
    const auto pieces = strided_micro_batches(options.batch, 2);
    Gpt whole(config, init);
    const double expected =
        accumulate_gradients(options, whole, data, 0, pieces);

    const std::int64_t own = config.vocab_size / tp.size();
    const std::int64_t first = tp.rank() * own;
    LayerFactory layers;
    layers.logits = [&](const Tensor& x, AnyModule& wte) {
      const Tensor rows =
          slice(wte.as<Embedding>().weight, 0, first, first + own);
      const Tensor flat = reshape(copied_to(x, tp), {-1, rows.size(1)});
      return reshape(matmul(flat, rows, false, true),
                     {x.size(0), x.size(1), own});
    };
    layers.loss = [&](const Tensor& logits, const Tensor& targets) {
      return vocabulary_parallel_loss(logits, targets, tp);
    };
    Gpt sharded(config, init, layers);
    const double loss = accumulate_gradients(options, sharded, data, 0, pieces,
                                             /*loss_scale=*/1, layers.loss);

    EXPECT_NEAR(loss, expected, kSameSum);
    const auto mine = sharded.named_parameters();
    const auto theirs = whole.named_parameters();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      Tensor grad = mine[i].tensor.grad(), of_one = theirs[i].tensor.grad();
      if (mine[i].name == "transformer.wte.weight") {
        // Each rank has the whole gradient of its own rows.
        grad = slice(grad, 0, first, first + own);
        of_one = slice(of_one, 0, first, first + own);
      }
      EXPECT_LT(max_abs_difference(grad, of_one), kSameSum) << mine[i].name;
    }
  });
}

// Each way of training asks the loss that it is given.
TEST(LayerFactory, TrainingUsesTheLossOfTheFactory) {
  const ModelConfig config = two_layers();
  const Options options = small_batches();
  const Dataset data = Dataset::open("walk", options.seq, config.vocab_size, 1);
  LayerFactory layers;
  layers.loss = [](const Tensor& logits, const Tensor& targets) {
    return scale(language_loss(logits, targets), 2);
  };
  Gpt model(config, {}, layers);
  const auto pieces = ceil_micro_batches(options.batch, 1);
  const double once = accumulate_gradients(options, model, data, 0, pieces);
  EXPECT_EQ(
      accumulate_gradients(options, model, data, 0, pieces, 1, layers.loss),
      2 * once);
  pipeline::LanguageFeed feed(options, data, pieces, layers.loss);
  EXPECT_EQ(feed.loss(0, {model(feed.inputs(0)[0])}).item(), 2 * once);
  run_ranks(1, [&](ProcessGroup& dp) {
    Gpt model(config, {}, layers);
    const Tensor loss = data_parallel_gradients(
        options, dp, data, 0, 1, [](bool) {},
        [&](const Tensor& inputs) { return model(inputs); }, layers.loss);
    EXPECT_NEAR(loss.item(), 2 * once, kSameSum);
  });
}

// --- Dropout and positions ---------------------------------------------------

/// Dropout of [n, S/count, h], part `index` of the sequence.
class SequenceDropout : public ModuleOf<SequenceDropout> {
 public:
  SequenceDropout(double p, std::int64_t index, std::int64_t count)
      : p_(p), index_(index), count_(count) {}
  Tensor forward(const Tensor& x) override {
    Shape whole = x.shape();
    whole[1] *= count_;
    return dropout(x, p_, {whole, {0, index_ * x.size(1), 0}, {}});
  }
  void members(MemberVisitor&) override {}

 private:
  double p_;
  std::int64_t index_, count_;
};

/// Of two ranks that each have half of the sequence.
LayerFactory half_of_the_sequence(std::int64_t index) {
  LayerFactory layers;
  layers.dropout = [index](double p) -> AnyModule {
    return {std::make_unique<SequenceDropout>(p, index, 2)};
  };
  layers.position_embedding =
      [index](const std::string& name, std::int64_t rows, std::int64_t width,
              double stddev, InitOptions init) -> AnyModule {
    init.shards = {{0, index, 2}};
    return {std::make_unique<Embedding>(name, rows, width, init, stddev)};
  };
  layers.positions = [](AnyModule& wpe, const Tensor&) {
    return wpe.as<Embedding>().weight;
  };
  return layers;
}

Tensor drawn(Module& module, const Tensor& x) {
  // Rows 3, 5, .. of the global batch
  const ContextValue<RandomState> state(&RankContext::random,
                                        RandomState{7, 2, 0, {3, 2}});
  const Deterministic deterministic;
  Tensor y = module(x);
  autograd::backward({y}, {Tensor::full(y.shape(), 1, y.options())});
  return y.detach();
}

TEST(LayerFactory, AShardOfTheSequenceDrawsItsPartOfTheMask) {
  ModelConfig config = two_layers();
  config.dropout = 0.4;
  const InitOptions init;
  GptMlp whole("mlp", config, init);
  const Tensor x = Tensor::empty({2, 8, config.n_embd});
  fill_normal(x, 1, 1, 0, 1);
  x.set_requires_grad();
  const Tensor y = drawn(whole, x);
  for (std::int64_t index = 0; index < 2; ++index) {
    const auto half = [&](const Tensor& tensor) {
      return slice(tensor, 1, 4 * index, 4 * index + 4).detach();
    };
    GptMlp sharded("mlp", config, init, half_of_the_sequence(index));
    const Tensor mine = half(x).set_requires_grad();
    EXPECT_TRUE(bitwise_equal(drawn(sharded, mine), half(y)));
    EXPECT_TRUE(bitwise_equal(mine.grad(), half(x.grad())));
  }
}

/// A chapter's layer that is core's and more.
class DoubledLinear : public ModuleOf<DoubledLinear, Linear> {
 public:
  Tensor forward(const Tensor& x) override {
    return scale(Linear::forward(x), 2);
  }
};

// gelu_mlp must not go past a layer that somebody watches or replaces.
TEST(GptMlp, UsesItsLayersAsTheyAre) {
  const ModelConfig config = two_layers();
  const InitOptions init;
  const Tensor x = Tensor::empty({2, 8, config.n_embd});
  fill_normal(x, 1, 1, 0, 1);
  GptMlp plain("mlp", config, init);
  const Tensor y = plain(x);
  EXPECT_TRUE(bitwise_equal(y, plain.c_proj(gelu(plain.c_fc(x)))));

  for (const bool is_first : {true, false}) {
    GptMlp watched("mlp", config, init);
    int calls = 0;
    Module& layer = *(is_first ? watched.c_fc : watched.c_proj);
    layer.add_forward_hook([&](Module&, Tensors&) { ++calls; });
    layer.add_forward_pre_hook([&](Module&, Tensors&) { ++calls; });
    EXPECT_TRUE(bitwise_equal(watched(x), y));
    EXPECT_EQ(calls, 2);

    GptMlp replaced("mlp", config, init);
    auto doubled = std::make_unique<DoubledLinear>();
    const Linear& old =
        (is_first ? replaced.c_fc : replaced.c_proj).as<Linear>();
    doubled->weight = old.weight, doubled->bias = old.bias;
    (is_first ? replaced.c_fc : replaced.c_proj) =
        AnyModule(std::move(doubled));
    EXPECT_TRUE(
        bitwise_equal(replaced(x), replaced.c_proj(gelu(replaced.c_fc(x)))));
    EXPECT_FALSE(bitwise_equal(replaced(x), y));
  }
}

TEST(LayerFactory, AShardOfThePositionsIsItsPartOfTheTable) {
  ModelConfig config = two_layers();
  config.dropout = 0.4;
  config.n_positions = 8;
  const InitOptions init;
  GptEmbedding whole(config, init);
  Tensor tokens = Tensor::empty({3, 8}, {DType::kI64, Device()});
  for (std::int64_t i = 0; i < 24; ++i) {
    tokens.data<std::int64_t>()[i] = 7 * i % config.vocab_size;
  }
  const Tensor y = drawn(whole, tokens);
  const Tensor gradient = whole.wpe.as<Embedding>().weight.grad();
  for (std::int64_t index = 0; index < 2; ++index) {
    const std::int64_t begin = 4 * index, end = begin + 4;
    GptEmbedding sharded(config, init, half_of_the_sequence(index));
    const Tensor part = drawn(sharded, slice(tokens, 1, begin, end));
    EXPECT_TRUE(bitwise_equal(part, slice(y, 1, begin, end)));
    const Tensor& weight = sharded.wpe.as<Embedding>().weight;
    ASSERT_EQ(weight.shape(), (Shape{4, config.n_embd}));
    EXPECT_TRUE(bitwise_equal(weight.grad(), slice(gradient, 0, begin, end)));
  }
  // The same names as in the whole model
  GptEmbedding part(config, init, half_of_the_sequence(0));
  EXPECT_EQ(part.named_parameters()[1].name, "transformer.wpe.weight");
}

}  // namespace
}  // namespace shardbook
