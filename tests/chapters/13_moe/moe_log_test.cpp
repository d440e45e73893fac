// The messages of a layer of experts, one by one; its forward bit for bit.

#include <algorithm>

#include "comm/device_mesh.h"
#include "tests/chapters/13_moe/moe_support.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kLogTokens = 16, kLogExperts = 4, kLogSlots = 4;

MoeOptions logged_options() {
  MoeOptions options;
  options.gate.num_experts = kLogExperts;
  options.gate.second_expert_sampling = false;
  return options;
}

/// "op numel", forward and backward of a layer on ep x tp ranks, by default
/// without the sums of tensor-parallel experts.
std::vector<std::string> log_of(int ep, int tp, const MoeOptions& options,
                                bool with_sums = false) {
  const auto logs = on_ranks(ep * tp, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"ep", "tp"}, {ep, tp}));
    MoeGroups groups;
    groups.ep = &mesh.group("ep"), groups.tp = &mesh.group("tp");
    MoeLayer layer = make_layer(options, groups);
    const Tensor x = leaf({1, kLogTokens, kLayerWidth},
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
constexpr std::int64_t kAll = kLogExperts * kLogSlots * kLayerWidth;
std::string line(const std::string& call, std::int64_t numel) {
  return call + " " + std::to_string(numel);
}

// tp ranks have the same tokens and cut the slots: 1 / t of them travels, and
// one gather in each direction completes them.
TEST(MoeLog, TensorParallelRanksSendPartsOfTheSlots) {
  const std::string part = line("all_to_all ep", kAll / 2);
  const std::string whole = line("all_gather tp", kAll);
  EXPECT_EQ(log_of(2, 2, logged_options()),
            (Lines{part, part, whole, part, part, whole}));
  // Experts cut by tp need all slots: a gather before, and in backward
  MoeOptions cut = logged_options();
  cut.expert_tensor_parallel = true;
  EXPECT_EQ(log_of(2, 2, cut),
            (Lines{part, whole, part, whole, part, whole, part, whole}));
}

// Where nothing is dropped, ranks first agree on one number: the slots.
TEST(MoeLog, WithoutDroppingRanksAgreeOnOneNumber) {
  MoeOptions options = logged_options();
  options.gate.drop_tokens = false;
  const Lines log = log_of(2, 1, options, /*with_sums=*/true);
  ASSERT_EQ(log.size(), 5U);
  EXPECT_EQ(log[0], "all_reduce world 1");
  for (std::size_t i = 1; i < 5; ++i) EXPECT_EQ(log[i], log[1]);
}

// The largest count over all ranks, not the sum.
TEST(MoeLog, WithoutDroppingTheBusiestExpertOfAnyRankSetsTheSlots) {
  MoeOptions options = logged_options();
  options.gate.drop_tokens = false;
  const auto loads = on_ranks(4, [&](ProcessGroup& world) {
    const auto record = std::make_shared<MoeRecord>();
    MoeLayer layer = make_layer(options, {&world, nullptr}, record);
    layer(noise({1, kLogTokens, kLayerWidth},
                static_cast<std::uint64_t>(world.rank())));
    return record->loads.at(kName);
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
    MoeLayer layer = make_layer(options, {&world, nullptr});
    const Tensor x = leaf({1, kLogTokens, kLayerWidth},
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

// An expert treats rows independently: the forward on any group of ranks equals
// one device's, bit for bit.
TEST(MoeLog, ForwardIsBitForBitThatOfOneDevice) {
  const auto forward = [](std::int64_t k, DType dtype, const MoeGroups& groups,
                          int rank, int ranks) {
    RankContext::current().random.batch = {rank, ranks};
    MoeOptions options = logged_options();
    options.gate.k = k;
    InitOptions init = f64_init();
    init.dtype = dtype;
    MoeLayer layer = make_layer(options, groups, nullptr, init);
    return layer(noise({1, kLogTokens, kLayerWidth},
                       static_cast<std::uint64_t>(rank), -1, 1,
                       {dtype, Device()}))
        .detach();
  };
  for (const auto& [k, dtype] : {std::pair{1, DType::kF64},
                                 {2, DType::kF64},
                                 {3, DType::kF64},
                                 {1, DType::kF32}}) {
    for (const int ep : {2, 4}) {
      const auto found = on_ranks(ep, [&, k = k, dtype = dtype](auto& world) {
        return forward(k, dtype, {&world, nullptr}, world.rank(), ep);
      });
      const auto one = on_ranks(1, [&, k = k, dtype = dtype](ProcessGroup&) {
        Tensors all;
        for (int rank = 0; rank < ep; ++rank) {
          all.push_back(forward(k, dtype, {}, rank, ep));
        }
        return all;
      });
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        EXPECT_TRUE(bitwise_equal(found[rank], one[0][rank])) << k << " " << ep;
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::moe
