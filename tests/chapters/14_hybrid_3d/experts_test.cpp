// Experts on meshes with every other axis: losses, norms and weights equal one
// device's, which routes the same groups of tokens; the bill to the byte.

#include <fstream>
#include <map>
#include <set>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::hybrid {
namespace {

struct ExpertMesh {
  int ep = 1, edp = 1, tp = 1, cp = 1, pp = 1, zero = 0;
  bool sequence_parallel = false, expert_tp = false;
};

HybridOptions with_experts(const ExpertMesh& mesh) {
  HybridOptions setup;
  setup.dp = mesh.ep * mesh.edp, setup.ep = mesh.ep;
  setup.tp = mesh.tp, setup.cp = mesh.cp, setup.pp = mesh.pp;
  setup.zero_stage = mesh.zero;
  setup.sequence_parallel = mesh.sequence_parallel;
  setup.expert_tp = mesh.expert_tp;
  setup.micro_batches = 2;
  setup.experts = 4;
  setup.aux_coefficient = 0.3;  // large, so that its scale shows
  return setup;
}

void expect_routed_as_one_device(const HybridOptions& setup) {
  const Options options = nano_options(ranks_of(setup));
  expect_trained_as(options, setup, reference_with_experts(options, setup));
}

TEST(HybridExperts, TrainAsOneDevice) {
  const std::vector<ExpertMesh> all = {
      {1, 1},
      {2, 1},
      {4, 1},
      {2, 2},
      {1, 2, 1, 1, 2},
      {2, 1, 1, 1, 2},
      {2, 1, 1, 1, 3, 1},
      {2, 2, 1, 1, 2, 1},
      {4, 1, 1, 1, 2, 1},
      {1, 1, 2},
      {2, 1, 2},
      {2, 2, 2, 1, 1, 1},
      {1, 2, 2, 1, 2},
      {2, 1, 2, 1, 2},
      {2, 1, 2, 1, 2, 1},
      {2, 2, 2, 1, 2, 1},
      {2, 1, 2, 1, 2, 0, true},
      {2, 2, 2, 1, 2, 1, true},
      {2, 1, 2, 1, 2, 0, false, true},
      {2, 2, 2, 1, 2, 1, true, true},
      {2, 1, 1, 2},
      {2, 1, 1, 2, 2, 1},
      {2, 1, 2, 2, 1, 1, true},
      {2, 1, 2, 2, 2, 1, false, true},
  };
  const std::vector<ExpertMesh> few = {{2, 1, 2, 1, 2, 1, true},
                                       {2, 1, 1, 2, 2}};
  for (const ExpertMesh& mesh : sized(all, few)) {
    expect_routed_as_one_device(with_experts(mesh));
  }
}

// Experts are sharded over fewer ranks than the other parameters.
TEST(HybridExperts, TrainAsOneDeviceUnderZero2) {
  const std::vector<ExpertMesh> all = {
      {1, 1, 1, 1, 1, 2},
      {2, 1, 1, 1, 1, 2},
      {2, 2, 1, 1, 1, 2},
      {1, 3, 1, 1, 1, 2},
      {2, 1, 2, 1, 1, 2},
      {2, 2, 2, 1, 1, 2, true},
      {2, 1, 2, 1, 1, 2, true, true},
      {2, 1, 1, 2, 1, 2},
      {2, 1, 2, 2, 1, 2, true},
  };
  const std::vector<ExpertMesh> few = {{2, 1, 2, 1, 1, 2, true},
                                       {2, 2, 1, 1, 1, 2}};
  for (const ExpertMesh& mesh : sized(all, few)) {
    expect_routed_as_one_device(with_experts(mesh));
  }
  HybridOptions setup = with_experts({2, 1, 1, 1, 1, 2});
  setup.recompute = "blocks";
  setup.bucket_bytes = 20000;
  expect_routed_as_one_device(setup);
}

TEST(HybridExperts, RunUnderEverySchedule) {
  for (const std::string& schedule : sized<std::string>(
           {"gpipe", "interleaved", "zb-h1", "zb-auto", "dualpipe"},
           {"zb-h1", "dualpipe"})) {
    HybridOptions setup = with_experts({2, 1, 1, 1, 2, 1});
    setup.schedule = schedule;
    setup.micro_batches = 4;
    expect_routed_as_one_device(setup);
  }
}

// A recomputed forward routes its tokens as before, and sends them again.
TEST(HybridExperts, RouteAlikeWhenForwardRunsAgain) {
  for (const char* recompute :
       sized<const char*>({"always", "except_last"}, {"always"})) {
    for (const ExpertMesh& mesh :
         {ExpertMesh{2, 1, 1, 1, 2}, ExpertMesh{2, 1, 2, 1, 2, 1, true}}) {
      HybridOptions setup = with_experts(mesh);
      setup.recompute = recompute;
      expect_routed_as_one_device(setup);
    }
  }
}

TEST(HybridExperts, ChooseSeveral) {
  for (const std::int64_t k : {2, 3}) {
    HybridOptions setup = with_experts({2, 1, 2, 1, 2, 1});
    setup.top_k = k;
    setup.capacity_factor = 1.3;
    setup.experts = 6;
    setup.tp = 1;
    expect_routed_as_one_device(setup);
  }
}

TEST(HybridExperts, MoveWithTheOrderOfRanks) {
  for (const std::string& order : sized<std::string>(
           {"megatron-pp-dp", "dp-tp-pp-cp", "pp-dp-cp-tp"}, {"dp-tp-pp-cp"})) {
    HybridOptions setup = with_experts({2, 2, 2, 1, 2, 1});
    setup.order = order;
    expect_routed_as_one_device(setup);
  }
  HybridOptions setup = with_experts({2, 3, 2, 1, 2});
  EXPECT_EQ(topology_of(setup).text(), "pp=2 x edp=3 x ep=2 x cp=1 x tp=2");
  for (int rank = 0; rank < 24; ++rank) {
    HybridOptions dense = setup;
    dense.ep = 1;
    EXPECT_EQ(replica_of(topology_of(setup), rank),
              topology_of(dense).coordinate(rank, "dp"));
  }
}

TEST(HybridExperts, EachPartOfASequenceIsRoutedByItself) {
  for (const char* layout :
       sized<const char*>({"contiguous", "zigzag", "striped"}, {"zigzag"})) {
    HybridOptions setup = with_experts({2, 1, 1, 2, 2, 1});
    setup.cp_layout = layout;
    expect_routed_as_one_device(setup);
  }
}

/// All experts have room for all tokens, and no loss depends on the groups that
/// are routed together, so cuts can only affect random numbers.
HybridOptions without_drops(const ExpertMesh& mesh) {
  HybridOptions setup = with_experts(mesh);
  setup.capacity_factor = static_cast<double>(setup.experts);
  setup.aux_coefficient = 0;
  return setup;
}

/// Losses of the mesh, and of one device that has the whole sequences.
void expect_noise_of_whole_sequences(const HybridOptions& setup) {
  HybridOptions joined = setup;
  joined.cp = 1, joined.cp_layout = "contiguous";
  Options options = nano_options(ranks_of(setup));
  options.batch = 8, options.steps = 2;
  ReferenceRun one = reference_run(options, joined);
  expect_trained_as(options, setup, one);
  joined.noise = "none", joined.top_k = 1;
  EXPECT_NE(reference_run(options, joined).losses, one.losses);
}

// A token draws the same numbers on every rank. With its place in the rank's
// part as key, or with none, losses differ.
TEST(HybridExperts, NoiseIsKeyedByTheTokenNotByItsRank) {
  struct Case {
    const char *noise, *layout;
    std::int64_t top_k;  // 2: samples the second expert
  };
  for (const Case& each : sized<Case>({{"jitter", "zigzag", 1},
                                       {"rsample", "striped", 1},
                                       {"noisy-top-k", "contiguous", 1},
                                       {"none", "zigzag", 2}},
                                      {{"jitter", "zigzag", 1}})) {
    HybridOptions setup = without_drops({2, 1, 1, 2, 1});
    setup.noise = each.noise, setup.cp_layout = each.layout;
    setup.top_k = each.top_k;
    expect_noise_of_whole_sequences(setup);
  }
}

// Also with tensor parallelism and cut tokens, recomputation and stages.
TEST(HybridExperts, NoiseIsReplayedOnEveryAxis) {
  for (const ExpertMesh& mesh : sized<ExpertMesh>(
           {{2, 1, 2, 2, 1, 1, true}, {2, 1, 1, 2, 2}}, {{2, 1, 1, 2, 2}})) {
    HybridOptions setup = without_drops(mesh);
    setup.noise = "jitter", setup.recompute = "blocks";
    setup.cp_layout = "zigzag";
    expect_noise_of_whole_sequences(setup);
  }
}

TEST(HybridExperts, DropoutDrawsAsOneDevice) {
  for (const ExpertMesh& mesh :
       {ExpertMesh{2, 1, 2, 1, 2, 1}, ExpertMesh{2, 1, 2, 1, 1, 0, true},
        ExpertMesh{2, 1, 1, 2, 2}}) {
    const HybridOptions setup = with_experts(mesh);
    SCOPED_TRACE(name_of(setup));
    Options options = nano_options(ranks_of(setup));
    options.dropout = 0.2;
    expect_claims(train_on(options, setup));
  }
}

// --- The end of a step -------------------------------------------------------

/// The "gradients" of each bucket: the size of the summing group, and whether
/// it has experts.
std::set<std::string> groups_of_sums(const HybridOptions& setup) {
  std::set<std::string> found;
  for (const auto& here : on_mesh(
           nano_options(ranks_of(setup)), setup,
           [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
             std::set<std::string> sums;
             for (const UpdateBucket& bucket : strategy.update().buckets()) {
               for (const NamedTensor& each : bucket.parameters) {
                 sums.insert((moe::is_expert(each.name) ? "experts over "
                                                        : "dense over ") +
                             std::to_string(bucket.data->size()));
               }
             }
             return sums;
           })) {
    found.insert(here.begin(), here.end());
  }
  return found;
}

// Over the ranks with the same experts, never over ranks with others.
TEST(HybridExpertSums, ReachTheRanksThatHoldTheSameExperts) {
  using Sums = std::set<std::string>;
  EXPECT_EQ(groups_of_sums(with_experts({2, 2, 1, 1, 2})),
            (Sums{"dense over 4", "experts over 2"}));
  // tp cuts slots: its ranks are replicas of the experts
  EXPECT_EQ(groups_of_sums(with_experts({2, 2, 2, 1, 1})),
            (Sums{"dense over 4", "experts over 4"}));
  EXPECT_EQ(groups_of_sums(with_experts({2, 2, 2, 1, 1, 0, false, true})),
            (Sums{"dense over 4", "experts over 2"}));
  EXPECT_EQ(groups_of_sums(with_experts({2, 1, 1, 2, 1})),
            (Sums{"dense over 4", "experts over 2"}));
}

// The elements that the ranks add to the norm sum to the model's.
TEST(HybridExpertNorm, CountsEachElementOnce) {
  for (const ExpertMesh& mesh :
       {ExpertMesh{2, 2, 2, 1, 2, 0}, ExpertMesh{2, 2, 2, 1, 2, 1},
        ExpertMesh{2, 1, 2, 1, 2, 0, true, true},
        ExpertMesh{2, 1, 2, 1, 1, 1, true, true},
        ExpertMesh{2, 1, 1, 2, 2, 1}}) {
    const HybridOptions setup = with_experts(mesh);
    SCOPED_TRACE(name_of(setup));
    const Options options = nano_options(ranks_of(setup));
    LayerFactory layers =
        reference_layers(setup, std::make_shared<moe::MoeRecord>());
    const std::int64_t whole =
        Gpt(model_config(options), InitOptions{}, layers).num_parameters();
    EXPECT_EQ(counted_in_norm(setup), whole);
  }
}

TEST(HybridExperts, CopiesStayEqualBitForBit) {
  for (const ExpertMesh& mesh :
       {ExpertMesh{2, 2, 2, 1, 1, 0}, ExpertMesh{2, 2, 2, 1, 1, 1},
        ExpertMesh{2, 1, 1, 2, 2, 1}}) {
    expect_equal_copies(with_experts(mesh));
  }
}

// --- What is kept ------------------------------------------------------------

std::string saved_experts(const HybridOptions& setup, const std::string& load,
                          std::int64_t steps) {
  const TempFolder folder;
  Options options = nano_options(ranks_of(setup));
  options.steps = steps;
  options.load = load;
  options.save = folder / "saved.safetensors";
  options.check = false;
  train_on(options, setup);
  std::ifstream file(options.save, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(HybridExperts, MoveToOtherMeshes) {
  const std::vector<ExpertMesh> meshes =
      sized<ExpertMesh>({{2, 1, 2, 1, 2, 1},
                         {4, 1},
                         {1, 1, 1, 1, 3},
                         {2, 1, 2, 1, 1, 1, true, true},
                         {2, 1, 1, 2, 2}},
                        {{2, 1, 2, 1, 2, 1}, {2, 1, 1, 2, 2}});
  const TempFolder folder;
  const std::string path = folder / "from.safetensors";
  const std::string saved = saved_experts(with_experts(meshes[0]), "", 1);
  ASSERT_FALSE(saved.empty());
  std::ofstream(path, std::ios::binary) << saved;
  for (const ExpertMesh& mesh : meshes) {
    EXPECT_TRUE(saved_experts(with_experts(mesh), path, 0) == saved)
        << name_of(with_experts(mesh));
  }
}

TEST(HybridExperts, RefuseWhatDoesNotWork) {
  const auto refused = [](HybridOptions setup,
                          const std::vector<std::string>& parts) {
    setup.micro_batches = 2;
    expect_refusal(nano_options(ranks_of(setup)), setup, parts);
  };
  refused({.dp = 4, .experts = 4, .ep = 3}, {"--ep 3", "4 replicas", "give 2"});
  refused({.dp = 4, .experts = 6, .ep = 4}, {"--ep 4", "6 experts", "give 3"});
  refused({.dp = 2, .experts = 1, .ep = 2}, {"--ep 2", "--num-experts 2"});
  refused({.dp = 2, .zero_stage = 3, .experts = 4, .ep = 2},
          {"--zero-stage 3, --num-experts 4", "give 1 or 2"});
  refused({.dp = 2, .experts = 4, .ep = 2, .expert_tp = true},
          {"--expert-tp", "--tp 2"});
  refused({.dp = 2, .tp = 2, .experts = 4, .ep = 2, .capacity_factor = 1.01},
          {"--tp 2", "slots", "--capacity-factor"});
  refused({.dp = 2, .experts = 4, .ep = 2, .top_k = 5},
          {"--top-k 5", "4 experts"});
}

TEST(HybridExperts, FoldedRanksTakeTheTimeOfAll) {
  for (const ExpertMesh& mesh :
       {ExpertMesh{2, 2, 2, 1, 2, 0}, ExpertMesh{2, 1, 2, 1, 2, 1, true},
        ExpertMesh{2, 2, 1, 2, 2, 1}, ExpertMesh{2, 1, 2, 1, 1, 2}}) {
    const HybridOptions setup = with_experts(mesh);
    expect_folded_as_all(nano_options(ranks_of(setup)), setup);
  }
}

}  // namespace
}  // namespace shardbook::hybrid
