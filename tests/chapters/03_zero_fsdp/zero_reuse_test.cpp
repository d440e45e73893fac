// ZeRO-3: units that stay whole for their next use, how many may be whole, and
// gradients that travel in another dtype.

#include <gtest/gtest.h>

#include <map>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/errors.h"

namespace shardbook::zero_test {
namespace {

constexpr std::int64_t kLayers = 3, kForever = 1'000'000'000;

ModelConfig small_gpt() { return {"gpt2", 61, 16, 12, kLayers, 2}; }

Tensor tokens(int first) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < 16; ++i) values.push_back((first + i * i) % 61);
  return Tensor::from_values<std::int64_t>(values, {2, 8});
}

void micro_step(ZeroOptimizer& zero, int number) {
  const int rank = zero.group().rank();
  const Tensor x = tokens(7 * number + rank);
  language_loss(zero(x), tokens(7 * number + rank + 1)).backward();
}

/// Gathered elements of the root and of a block on d ranks, nothing persistent.
struct Sizes {
  std::int64_t root = 0, block = 0;
};
Sizes sizes_on(int d) {
  Sizes sizes;
  const auto model = make_model(small_gpt(), init_of(DType::kF32));
  for (const auto& [name, tensor] : model->named_parameters()) {
    const std::int64_t padded = (tensor.numel() + d - 1) / d * d;
    if (name.find(".h.") == std::string::npos) sizes.root += padded;
    if (name.find(".h.0.") != std::string::npos) sizes.block += padded;
  }
  return sizes;
}

/// By unit, the root first: how often a micro-step gathers it.
using Gathers = std::vector<int>;
Gathers gathers_of(const std::vector<CommRecord>& records) {
  Gathers gathers(1 + kLayers);
  for (const CommRecord& each : records) {
    if (each.label.rfind("fetch ", 0) != 0) continue;
    const bool is_root = each.label == "fetch ";
    gathers[is_root ? 0
                    : 1 + static_cast<std::size_t>(each.label.back() - '0')] +=
        1;
  }
  return gathers;
}

struct Seen {
  Gathers first, later;
  double bytes_over = 0;        ///< counted minus predicted
  std::int64_t parameters = 0;  ///< peak, elements
  std::int64_t messages = 0;    ///< peak, elements
  std::int64_t shard = 0;
};

/// Two steps of two micro-steps each.
std::vector<Seen> seen_with(int d, const ZeroOptions& options) {
  return on_ranks(d, [&](ProcessGroup& world) {
    const auto model = make_model(small_gpt(), init_of(DType::kF32));
    const auto zero = make_zero(*model, world, options, "sgd", {});
    Device& device = RankContext::current().device;
    device.reset_peak_memory();
    Seen seen;
    for (int i = 0; i < 4; ++i) {
      const std::size_t before = world.records().size();
      micro_step(*zero, i);
      std::vector<CommRecord> mine(
          world.records().begin() + static_cast<std::ptrdiff_t>(before),
          world.records().end());
      if (i == 0) seen.first = gathers_of(mine);
      if (i == 3) seen.later = gathers_of(mine);
      if (i % 2 == 1) zero->step();
    }
    seen.bytes_over = wire_bytes(world.records()) - zero->predicted_bytes(2, 2);
    const MemoryStats memory = device.memory();
    seen.parameters = memory.peak(MemoryKind::kParameter) / 4;
    seen.messages = memory.peak(MemoryKind::kCommunication) / 4;
    seen.shard = zero->shard_numel();
    return seen;
  });
}

// The page's rule: block i of L is kept where R + 2 (L - 1 - i) B is below the
// distance. Backward begins with the root, so it is kept if any unit is.
TEST(ZeroReuse, TheDistanceDecidesWhichUnitsAreGatheredOnce) {
  for (const int d : {2, 3, 4}) {
    const Sizes sizes = sizes_on(d);
    const auto r = sizes.root, b = sizes.block;
    for (const std::int64_t distance :
         {std::int64_t{0}, std::int64_t{1}, r, r + 1, r + 2 * b, r + 2 * b + 1,
          kForever}) {
      for (const std::int64_t prefetch : {std::int64_t{0}, b, kForever}) {
        ZeroOptions options = stage(3);
        options.max_reuse_distance = distance;
        options.prefetch_bucket_size = prefetch;
        Gathers expected = {distance > 0 ? 1 : 2};
        for (std::int64_t i = 0; i < kLayers; ++i) {
          expected.push_back(r + 2 * (kLayers - 1 - i) * b < distance ? 1 : 2);
        }
        for (const Seen& seen : seen_with(d, options)) {
          SCOPED_TRACE(std::to_string(d) + " ranks, " +
                       std::to_string(distance));
          EXPECT_EQ(seen.first, Gathers(1 + kLayers, 2)) << "records the order";
          EXPECT_EQ(seen.later, expected);
          EXPECT_NEAR(seen.bytes_over, 0, 1e-6);
          // All kept units are whole at the end of the forward
          const auto kept = std::count(expected.begin() + 1, expected.end(), 1);
          if (prefetch == 0) {
            EXPECT_EQ(seen.parameters - seen.shard,
                      r + std::max<std::int64_t>(kept, 1) * b);
          }
        }
      }
    }
  }
}

TEST(ZeroReuse, TheLimitReleasesTheUnitOfTheFarthestUse) {
  for (const int d : {2, 3}) {
    const Sizes sizes = sizes_on(d);
    ZeroOptions options = stage(3);
    options.prefetch_bucket_size = 0;
    options.max_reuse_distance = kForever;
    for (std::int64_t blocks = 1; blocks <= kLayers; ++blocks) {
      // The root and `blocks` blocks, the last ones of the forward, stay
      options.max_live_parameters = sizes.root + blocks * sizes.block;
      Gathers expected(1 + kLayers, 1);
      for (std::int64_t i = 0; i < kLayers - blocks; ++i) {
        expected[static_cast<std::size_t>(1 + i)] = 2;
      }
      for (const Seen& seen : seen_with(d, options)) {
        EXPECT_EQ(seen.later, expected) << blocks;
        EXPECT_NEAR(seen.bytes_over, 0, 1e-6);
        EXPECT_EQ(seen.parameters - seen.shard, options.max_live_parameters);
      }
    }
    // Computing units are whole under any limit; no others are
    options.max_live_parameters = 0;
    for (const Seen& seen : seen_with(d, options)) {
      EXPECT_EQ(seen.later, Gathers(1 + kLayers, 2));
      EXPECT_EQ(seen.parameters - seen.shard, sizes.root + sizes.block);
    }
  }
}

TEST(ZeroReuse, TheLimitHoldsPrefetchingBack) {
  const int d = 2;
  const Sizes sizes = sizes_on(d);
  ZeroOptions options = stage(3);
  options.overlap_comm = false;
  options.prefetch_bucket_size = sizes.block;
  const Seen ahead = seen_with(d, options)[0];
  options.max_live_parameters = sizes.root + sizes.block;
  const Seen held = seen_with(d, options)[0];
  options.prefetch_bucket_size = 0;
  const Seen on_demand = seen_with(d, options)[0];
  // The root's gradients, and the block being gathered or reduced; with
  // prefetching, also a buffer for the next block
  EXPECT_EQ(held.messages, sizes.root + sizes.block);
  EXPECT_EQ(held.messages, on_demand.messages);
  EXPECT_EQ(ahead.messages, sizes.root + 2 * sizes.block);
  EXPECT_EQ(held.bytes_over, 0);
}

/// Three steps, each after an evaluation whose units are not used again.
State weights_after(int d, const ZeroOptions& options, bool recompute) {
  return on_ranks(d, [&](ProcessGroup& world) {
    const auto model = make_model(small_gpt(), init_of(DType::kF64));
    set_recompute(*model, recompute);
    const auto zero = make_zero(*model, world, options, "adamw", {});
    for (int step = 0; step < 3; ++step) {
      {
        const NoGrad no_grad;
        (*zero)(tokens(step));
        const MemoryStats memory = RankContext::current().device.memory();
        EXPECT_EQ(memory.current(MemoryKind::kParameter),
                  8 * zero->shard_numel())
            << "an evaluation keeps nothing";
      }
      micro_step(*zero, step);
      zero->step();
    }
    return state_of_zero(*zero);
  })[0];
}

// [BIT] Which units are kept, and how long, changes no number: after an update
// every unit is gathered anew.
TEST(ZeroReuse, KeptUnitsAreThoseOfTheLastUpdate) {
  for (const int d : {1, 2, 3}) {
    for (const bool recompute : {false, true}) {
      ZeroOptions options = stage(3);
      const State released = weights_after(d, options, recompute);
      options.max_reuse_distance = kForever;
      EXPECT_EQ(
          first_difference(weights_after(d, options, recompute), released), "");
      options.max_live_parameters = 4000;
      options.prefetch_bucket_size = 1000;
      EXPECT_EQ(
          first_difference(weights_after(d, options, recompute), released), "");
    }
  }
}

// --- The wire ----------------------------------------------------------------

// bf16 sums of values that bf16 holds are exact; sums of the f32 gradients are
// not, so the two runs differ only where the wire rounds.
TEST(ZeroWire, GradientsTravelInTheDtypeOfTheWire) {
  for (const int number : {1, 2, 3}) {
    for (const bool scatters : {true, false}) {
      if (number == 3 && !scatters) continue;
      ZeroOptions options = stage(number);
      options.reduce_bucket_size = 100;
      options.reduce_scatter = scatters;
      options.wire = DType::kBF16;
      const auto seen = on_ranks(3, [&](ProcessGroup& world) {
        Sequential model = make_184(DType::kF32);
        const auto zero = make_zero(model, world, options, "sgd", {});
        const Tensor x =
            Tensor::full({2, 8}, 1.0 + world.rank(), {DType::kF32, Device()});
        std::int64_t reductions = 0, narrow = 0;
        for (int i = 0; i < 2; ++i) {
          zero->set_boundary(i == 1);
          sum((*zero)(x)).backward();
        }
        for (const CommRecord& each : world.records()) {
          if (each.op != CommOp::kReduceScatter && each.op != CommOp::kReduce &&
              each.op != CommOp::kAllReduce) {
            continue;
          }
          reductions += 1;
          narrow += each.dtype == DType::kBF16;
        }
        zero->step();
        return std::vector<double>{
            double(reductions - narrow), double(reductions),
            wire_bytes(world.records()) - zero->predicted_bytes(1, 2)};
      });
      for (const auto& rank : seen) {
        EXPECT_EQ(rank[0], 0) << number;
        EXPECT_GT(rank[1], 0);
        EXPECT_NEAR(rank[2], 0, 1e-6);
      }
    }
  }
}

Training plain_sgd() {
  return {.optimizer = "sgd",
          .optimizer_options = {.lr = 0.05},
          .dtype = DType::kF64,
          .micro_steps = 2};
}

TEST(ZeroWire, OnlyTheWireRounds) {
  const Training run = plain_sgd();
  for (const int number : {1, 2, 3}) {
    ZeroOptions options = stage(number);
    options.reduce_bucket_size = 50;  // some gradients are larger
    const State exact = train_zero(4, run, options)[0];
    options.wire = DType::kF32;
    const double rounded =
        largest_difference(train_zero(4, run, options)[0], exact);
    EXPECT_GT(rounded, 1e-12) << number;
    EXPECT_LT(rounded, 1e-6) << number;
    options.wire = DType::kF64;
    EXPECT_EQ(first_difference(train_zero(4, run, options)[0], exact), "");
  }
}

// Division before, after, or in parts: once in all.
TEST(ZeroWire, ASumIsDividedOnceWhereverItIsDivided) {
  const Training run = plain_sgd();
  for (const int number : {1, 2}) {
    ZeroOptions options = stage(number);
    options.reduce_bucket_size = 50;
    options.reduce_scatter = false;
    const State first = train_zero(3, run, options)[0];
    for (const double before : {1.0, 2.0, 3.0}) {
      options.divide_before = before;
      EXPECT_LT(largest_difference(train_zero(3, run, options)[0], first),
                1e-12)
          << number << ", " << before;
    }
  }
}

}  // namespace
}  // namespace shardbook::zero_test
