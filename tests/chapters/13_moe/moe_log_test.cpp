// What a layer of experts sends, call by call, and its forward bit for bit.

#include <algorithm>
#include <memory>

#include "chapters/13_moe/moe_layer.h"
#include "comm/device_mesh.h"
#include "tests/core/support.h"
#include "tests/support/on_ranks.h"

namespace shardbook::moe {
namespace {

constexpr char kLogName[] = "transformer.h.0.mlp";
constexpr std::int64_t kLogTokens = 16, kLogWidth = 8, kLogExperts = 4,
                       kLogSlots = 4;

MoeOptions logged_options() {
  MoeOptions options;
  options.gate.num_experts = kLogExperts;
  options.gate.second_expert_sampling = false;
  return options;
}

MoeLayer logged_layer(const MoeOptions& options, const MoeGroups& groups) {
  ModelConfig config;
  config.n_embd = kLogWidth;
  MoeLayer layer = moe_mlp(options, groups, std::make_shared<MoeRecord>())(
                       kLogName, config, f64_init(), LayerFactory())
                       .as<MoeLayer>();
  layer.gate.weight.copy_from(noise({kLogWidth, kLogExperts}, 5, -2, 2));
  return layer;
}

/// "op numel", forward and backward of a layer on ep x tp ranks; sums left out,
/// which tensor-parallel experts have of their own.
std::vector<std::string> log_of(int ep, int tp, const MoeOptions& options,
                                bool with_sums = false) {
  const auto logs = on_ranks(ep * tp, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"ep", "tp"}, {ep, tp}));
    MoeGroups groups;
    groups.ep = &mesh.group("ep"), groups.tp = &mesh.group("tp");
    MoeLayer layer = logged_layer(options, groups);
    const Tensor x = leaf({1, kLogTokens, kLogWidth},
                          static_cast<std::uint64_t>(mesh.coordinate("ep")));
    world.clear_records();
    sum(layer(x)).backward();
    std::vector<std::string> lines;
    for (const CommRecord& record : world.records()) {
      if (record.op == CommOp::kAllReduce && !with_sums) continue;
      lines.push_back(comm_op_name(record.op) + (" " + record.group) + " " +
                      std::to_string(record.numel));
    }
    return lines;
  });
  for (const auto& log : logs) EXPECT_EQ(log, logs[0]);
  return logs[0];
}

using Lines = std::vector<std::string>;
constexpr std::int64_t kAll = kLogExperts * kLogSlots * kLogWidth;
std::string line(const std::string& call, std::int64_t numel) {
  return call + " " + std::to_string(numel);
}

// tp ranks have the same tokens and cut the slots: 1 / t of them travels, and one
// gather each way makes them whole.
TEST(MoeLog, TensorParallelRanksSendPartsOfTheSlots) {
  const std::string part = line("all_to_all ep", kAll / 2);
  const std::string whole = line("all_gather tp", kAll);
  EXPECT_EQ(log_of(2, 2, logged_options()),
            (Lines{part, part, whole, part, part, whole}));
  // Experts that tp cuts see all slots: a gather before, and in their backward
  MoeOptions cut = logged_options();
  cut.expert_tensor_parallel = true;
  EXPECT_EQ(log_of(2, 2, cut),
            (Lines{part, whole, part, whole, part, whole, part, whole}));
}

// Without dropping, ranks agree on the slots: one number, before all else.
TEST(MoeLog, WithoutDroppingRanksAgreeOnOneNumber) {
  MoeOptions options = logged_options();
  options.gate.drop_tokens = false;
  const Lines log = log_of(2, 1, options, /*with_sums=*/true);
  ASSERT_EQ(log.size(), 5U);
  EXPECT_EQ(log[0], "all_reduce world 1");
  for (std::size_t i = 1; i < 5; ++i) EXPECT_EQ(log[i], log[1]);
}

// The largest count of all ranks, not their sum.
TEST(MoeLog, WithoutDroppingTheBusiestExpertOfAnyRankSetsTheSlots) {
  MoeOptions options = logged_options();
  options.gate.drop_tokens = false;
  ModelConfig config;
  config.n_embd = kLogWidth;
  const auto loads = on_ranks(4, [&](ProcessGroup& world) {
    const auto record = std::make_shared<MoeRecord>();
    MoeLayer layer = moe_mlp(options, {&world, nullptr}, record)(
                         kLogName, config, f64_init(), LayerFactory())
                         .as<MoeLayer>();
    layer.gate.weight.copy_from(noise({kLogWidth, kLogExperts}, 5, -2, 2));
    layer(noise({1, kLogTokens, kLogWidth},
                static_cast<std::uint64_t>(world.rank())));
    return record->loads.at(kLogName);
  });
  std::int64_t busiest = 0;
  for (const MoeRecord::Load& load : loads) {
    busiest = std::max(busiest, *std::max_element(load.exp_counts.begin(),
                                                  load.exp_counts.end()));
  }
  for (const MoeRecord::Load& load : loads) {
    EXPECT_EQ(load.most_slots, busiest);
    EXPECT_EQ(load.dropped, 0);
  }
}

// Without capacity, ranks first tell each other E counts.
TEST(MoeLog, WithoutCapacityCountsGoFirst) {
  MoeOptions options = logged_options();
  options.is_dropless = true;
  const auto logs = on_ranks(2, [&](ProcessGroup& world) {
    MoeLayer layer = logged_layer(options, {&world, nullptr});
    const Tensor x = leaf({1, kLogTokens, kLogWidth},
                          static_cast<std::uint64_t>(world.rank()));
    world.clear_records();
    sum(layer(x)).backward();
    return world.records();
  });
  for (const auto& log : logs) {
    ASSERT_EQ(log.size(), 5U);
    EXPECT_EQ(log[0].numel, kLogExperts);
    EXPECT_EQ(log[0].dtype, DType::kI64);
  }
}

// An expert treats rows one by one: the forward of any group of ranks is that of
// one device bit for bit.
TEST(MoeLog, ForwardIsBitForBitThatOfOneDevice) {
  for (const std::int64_t k : {1, 2, 3}) {
    MoeOptions options = logged_options();
    options.gate.k = k;
    for (const int ep : {2, 4}) {
      const auto found = on_ranks(ep, [&](ProcessGroup& world) {
        RankContext::current().random.batch = {world.rank(), world.size()};
        MoeLayer layer = logged_layer(options, {&world, nullptr});
        return layer(noise({1, kLogTokens, kLogWidth},
                           static_cast<std::uint64_t>(world.rank())))
            .detach();
      });
      const auto one = on_ranks(1, [&](ProcessGroup&) {
        MoeLayer layer = logged_layer(options, {});
        Tensors all;
        for (int rank = 0; rank < ep; ++rank) {
          RankContext::current().random.batch = {rank, ep};
          all.push_back(layer(noise({1, kLogTokens, kLogWidth},
                                    static_cast<std::uint64_t>(rank)))
                            .detach());
        }
        return all;
      });
      for (int rank = 0; rank < ep; ++rank) {
        const auto i = static_cast<std::size_t>(rank);
        EXPECT_TRUE(bitwise_equal(found[i], one[0][i])) << k << " " << ep;
      }
    }
  }
}

TEST(MoeLog, ForwardInF32IsBitForBitThatOfOneDevice) {
  const TensorOptions narrow{DType::kF32, Device()};
  InitOptions init;
  init.dtype = DType::kF32;
  ModelConfig config;
  config.n_embd = kLogWidth;
  const auto forward = [&](const MoeGroups& groups, int rank, int ranks) {
    RankContext::current().random.batch = {rank, ranks};
    MoeLayer layer =
        moe_mlp(logged_options(), groups, std::make_shared<MoeRecord>())(
            kLogName, config, init, LayerFactory())
            .as<MoeLayer>();
    const Tensor x = noise({1, kLogTokens, kLogWidth},
                           static_cast<std::uint64_t>(rank), -1, 1, narrow);
    return layer(x).detach();
  };
  for (const int ep : {2, 4}) {
    const auto found = on_ranks(ep, [&](ProcessGroup& world) {
      return forward({&world, nullptr}, world.rank(), ep);
    });
    const auto one = on_ranks(1, [&](ProcessGroup&) {
      Tensors all;
      for (int rank = 0; rank < ep; ++rank) {
        all.push_back(forward({}, rank, ep));
      }
      return all;
    });
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      EXPECT_TRUE(bitwise_equal(found[rank], one[0][rank])) << ep;
    }
  }
}

}  // namespace
}  // namespace shardbook::moe
