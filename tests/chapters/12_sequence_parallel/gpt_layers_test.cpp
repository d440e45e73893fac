// GPT on cut sequences: losses and gradients equal one device's.

#include "chapters/12_sequence_parallel/gpt_layers.h"

#include <memory>
#include <tuple>

#include "chapters/common/sharded/loss.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "tests/chapters/12_sequence_parallel/sequence_support.h"
#include "tests/support/larger.h"

namespace shardbook::sequence_parallel {
namespace {

constexpr std::int64_t kBatch = 2, kSequence = 48;

ModelConfig small_gpt(double dropout) {
  ModelConfig config;
  config.vocab_size = 13;
  config.n_positions = 50;  // More than needed
  config.n_embd = 24;
  config.n_layer = 2;
  config.n_head = 24;
  config.dropout = dropout;
  return config;
}

Tensor ids(std::uint64_t seed) {
  const Tensor x = noise({kBatch, kSequence}, seed, 0, 12.99);
  return to_dtype(x, DType::kI64);
}

/// Loss, and all gradients end to end.
struct Found {
  double loss = 0;
  std::vector<double> gradients;
};

Found run(const LayerFactory& layers, const Tensor& targets = ids(8),
          double dropout = 0,
          const std::function<void(Gpt&)>& finish = nullptr) {
  const InitOptions init = {.seed = 5, .dtype = DType::kF64};
  ContextValue<RandomState> state(&RankContext::random,
                                  RandomState{3, 1, 0, {2, 3}});
  Gpt model(small_gpt(dropout), init, layers);
  // On this rank's device
  const Tensor own_targets = Tensor::from_values<std::int64_t>(
      targets.to_vector<std::int64_t>(), targets.shape());
  const Tensor loss = layers.loss(model(ids(7)), own_targets);
  loss.backward();
  if (finish) finish(model);
  Found found;
  found.loss = loss.item();
  for (const Tensor& parameter : model.parameters()) {
    const auto gradient = parameter.grad().to_vector<double>();
    found.gradients.insert(found.gradients.end(), gradient.begin(),
                           gradient.end());
  }
  return found;
}

/// Each rank's result.
std::vector<Found> on_cut(int c, const SequenceOptions& setup,
                          const Tensor& targets = ids(8), double dropout = 0) {
  return on_ranks(c, [&](ProcessGroup& world) {
    return run(sequence_layers(setup, kSequence, world), targets, dropout,
               [&](Gpt& model) {
                 sum_gradients(world, model.parameters(), "gradients");
               });
  });
}

double worst(const Found& a, const Found& b) {
  return larger(std::fabs(a.loss - b.loss),
                largest_gap(a.gradients, b.gradients));
}

using Case = std::tuple<int, Kind, Layout>;
class CutGpt : public testing::TestWithParam<Case> {
 protected:
  int c = std::get<0>(GetParam());
  SequenceOptions setup{std::get<1>(GetParam()), std::get<2>(GetParam()),
                        false};
};

TEST_P(CutGpt, EqualsOneDevice) {
  for (double dropout : {0.0, 0.2}) {
    const Found expected = run(LayerFactory(), ids(8), dropout);
    for (const Found& found : on_cut(c, setup, ids(8), dropout)) {
      EXPECT_NEAR(found.loss, expected.loss, 1e-12);
      expect_close(found.gradients, expected.gradients, 1e-10);
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int c : {1, 2, 3, 4, 8}) {
    for (Layout layout : all_layouts()) all.push_back({c, Kind::kRing, layout});
    all.push_back({c, Kind::kRsa, Layout::kContiguous});
    all.push_back({c, Kind::kUlysses, Layout::kContiguous});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, CutGpt, testing::ValuesIn(cases()));

const SequenceOptions kZigzagRing{Kind::kRing, Layout::kZigzag, false};
const SequenceOptions kUlyssesHeads{Kind::kUlysses, Layout::kContiguous, false};

TEST(CutGptLoss, CountsTheTargetsOfAllRanks) {
  // The first rank has almost no targets, as with long prompts
  std::vector<std::int64_t> masked = ids(8).to_vector<std::int64_t>();
  for (std::int64_t i = 0; i < kBatch * kSequence; ++i) {
    if (i % kSequence < 11) masked[static_cast<std::size_t>(i)] = -100;
  }
  const Tensor targets =
      Tensor::from_values<std::int64_t>(masked, {kBatch, kSequence});
  const Found expected = run(LayerFactory(), targets);
  for (const Found& found : on_cut(4, kUlyssesHeads, targets)) {
    EXPECT_LT(worst(found, expected), 1e-12);
  }
}

TEST(CutGptErrors, NameTheSizesThatWork) {
  const SequenceOptions ring;
  expect_error([&] { check_sizes(ring, 4, 50, 4); },
               {"--seq 50: 4 ranks", "multiple of 4"});
  expect_error([&] { check_sizes(kZigzagRing, 4, 52, 4); },
               {"multiple of 8", "56"});
  expect_error([&] { check_sizes(kUlyssesHeads, 8, 64, 4); },
               {"--world-size 8", "4 heads"});
  SequenceOptions rsa = kZigzagRing;
  rsa.kind = Kind::kRsa;
  expect_error([&] { check_sizes(rsa, 2, 64, 4); }, {"--layout zigzag"});
  expect_error([] { kind_of("star"); }, {"--kind star", "ulysses"});
}

}  // namespace
}  // namespace shardbook::sequence_parallel
