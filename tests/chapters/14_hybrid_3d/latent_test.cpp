// A small DeepSeek, which no command trains: its layers over a mesh do what they
// do on one device.

#include <memory>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/chapters/common/latent_support.h"

namespace shardbook::hybrid {
namespace {

Options deepseek_options(int world_size) {
  Options options = nano_options(world_size);
  options.planned = std::make_shared<const ModelConfig>(small_deepseek());
  return options;
}

class HybridLatent : public testing::TestWithParam<HybridOptions> {};

TEST_P(HybridLatent, TrainsAsOneDeviceDoes) {
  const HybridOptions setup = GetParam();
  SCOPED_TRACE(name_of(setup));
  const Report report = train_on(deepseek_options(ranks_of(setup)), setup);
  EXPECT_TRUE(report.parity.passed);
  EXPECT_LT(report.parity.max_rel, 1e-9);
}

HybridOptions with(int dp, int tp, int pp, int ep, int zero_stage,
                   const std::string& recompute = "never") {
  HybridOptions setup;
  setup.dp = dp, setup.tp = tp, setup.pp = pp, setup.ep = ep;
  setup.zero_stage = zero_stage;
  setup.sequence_parallel = tp > 1;
  setup.recompute = recompute;
  setup.micro_batches = 2;
  return setup;
}

INSTANTIATE_TEST_SUITE_P(All, HybridLatent,
                         testing::Values(with(1, 2, 1, 1, 0),
                                         with(1, 4, 1, 1, 0, "attention"),
                                         with(2, 1, 2, 2, 1),
                                         with(4, 1, 1, 4, 0, "blocks"),
                                         with(2, 2, 2, 2, 1)));

// Without experts, tokens need not be cut
TEST(HybridLatent, HeadsMayBeCutAlone) {
  Options options = deepseek_options(2);
  ModelConfig dense = small_deepseek();
  dense.llama.num_experts = 0;
  options.planned = std::make_shared<const ModelConfig>(dense);
  HybridOptions setup = with(1, 2, 1, 1, 0);
  setup.sequence_parallel = false;
  EXPECT_TRUE(train_on(options, setup).parity.passed);
}

TEST(HybridLatent, RefusalsSayWhatDoesNotDivide) {
  HybridOptions setup = with(1, 1, 1, 1, 0);
  setup.cp = 2;
  expect_refusal(deepseek_options(2), setup,
                 {"--cp 2", "latent attention", "give 1"});
  Options options = deepseek_options(2);
  ModelConfig odd = small_deepseek();
  odd.llama.shared_intermediate_size = 33;
  options.planned = std::make_shared<const ModelConfig>(odd);
  expect_refusal(options, with(1, 2, 1, 1, 0),
                 {"--tp 2: 33 hidden units of a shared expert"});
}

}  // namespace
}  // namespace shardbook::hybrid
