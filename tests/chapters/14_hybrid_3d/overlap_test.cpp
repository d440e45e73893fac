// Buckets that leave while backward goes on: when they leave, once per step,
// with the numbers of sums at the end.

#include "chapters/14_hybrid_3d/update.h"
#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

// --- Which buckets are full --------------------------------------------------

using Buckets = std::vector<std::size_t>;

TEST(FullBuckets, LeaveWithTheLastGradientThatTheFirstStepCounted) {
  FullBuckets full({0, 0, 1}, 2);
  for (const std::size_t parameter : {0, 2, 2, 1}) {
    EXPECT_EQ(full.count(parameter), Buckets());
  }
  EXPECT_EQ(full.end_step(), (Buckets{0, 1}));
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(full.count(0), Buckets());
    EXPECT_EQ(full.count(2), Buckets());
    EXPECT_EQ(full.count(2), Buckets{1});
    EXPECT_EQ(full.count(1), Buckets{0});
    EXPECT_EQ(full.end_step(), Buckets());
  }
}

// Replicas must agree on the order, whenever their buckets are full.
TEST(FullBuckets, LeaveInTheOrderOfTheFirstStep) {
  FullBuckets full({0, 1, 2}, 3);
  for (const std::size_t parameter : {2, 0, 1}) full.count(parameter);
  full.end_step();
  EXPECT_EQ(full.count(0), Buckets());
  EXPECT_EQ(full.count(2), (Buckets{2, 0}));
  EXPECT_EQ(full.end_step(), Buckets{1});
}

// Parameter 0 gets no gradient from the last micro-batch, and bucket 2 has no
// parameters.
TEST(FullBuckets, LeaveAtTheEndWhereGradientsAreMissing) {
  FullBuckets full({0, 0, 1}, 3);
  for (const std::size_t parameter : {1, 2}) full.count(parameter);
  EXPECT_EQ(full.end_step(), (Buckets{0, 1}));
  EXPECT_EQ(full.count(1), Buckets());
  EXPECT_EQ(full.count(2), Buckets{1});
  EXPECT_EQ(full.end_step(), Buckets{0});
}

// --- Training ----------------------------------------------------------------

struct Case {
  HybridOptions setup;
  DType dtype = DType::kF64;
};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {{.dp = 3, .micro_batches = 2}},
      {{.dp = 2, .schedule = "zb-h1", .micro_batches = 2}},
      {{.dp = 2, .tp = 2, .pp = 2, .micro_batches = 2}},
      {{.dp = 2,
        .tp = 2,
        .pp = 2,
        .zero_stage = 1,
        .sequence_parallel = true,
        .schedule = "zb-h1",
        .micro_batches = 2}},
      {{.dp = 2,
        .pp = 2,
        .zero_stage = 1,
        .schedule = "interleaved",
        .micro_batches = 4}},
      // Both ranks have both ends of the tied embedding
      {{.dp = 2, .pp = 2, .schedule = "dualpipe", .micro_batches = 4}},
      {{.pp = 2, .cp = 2, .micro_batches = 2, .recompute = "always"}},
      {{.dp = 2, .pp = 2, .micro_batches = 2, .recompute = "blocks"}},
      {{.dp = 2,
        .pp = 2,
        .zero_stage = 1,
        .micro_batches = 2,
        .experts = 4,
        .ep = 2}}};
  for (const int zero : {0, 1}) {
    all.push_back({{.dp = 2,
                    .pp = 2,
                    .zero_stage = zero,
                    .micro_batches = 2,
                    .accumulate_f32 = true},
                   DType::kBF16});
  }
  for (Case& each : all) {
    each.setup.dp = std::max(each.setup.dp, 1);
    each.setup.bucket_bytes = 20000;
    each.setup.overlap_grad_reduce = true;
  }
  return all;
}

Options options_of(const Case& each) {
  Options options = nano_options(ranks_of(each.setup));
  options.dtype = each.dtype;
  return options;
}

TEST(HybridOverlap, TrainsAsOneDeviceAndSendsWhatTheBillSays) {
  for (const Case& each : cases()) {
    SCOPED_TRACE(name_of(each.setup));
    expect_claims(train_on(options_of(each), each.setup));
  }
}

// Without a clip, each element is a sum in the order of ranks, whichever bucket
// it travels in.
TEST(HybridOverlap, HasTheBitsOfSumsAtTheEnd) {
  if (kSanitized) GTEST_SKIP() << "the same runs as above, twice";
  for (const Case& each : cases()) {
    SCOPED_TRACE(name_of(each.setup));
    Options options = options_of(each);
    options.clip = 0;
    const auto train = [&](bool overlaps) {
      HybridOptions setup = each.setup;
      setup.overlap_grad_reduce = overlaps;
      return on_mesh(options, setup,
                     [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
                       for (std::int64_t k = 0; k < 3; ++k) strategy.step(k);
                       return values_of(strategy);
                     });
    };
    EXPECT_EQ(train(true), train(false));
  }
}

/// The sums of gradients in one step, and those that backward sent.
struct Sent {
  std::size_t buckets = 0, all = 0, in_backward = 0;
  bool went_on = false;  ///< backward sent other messages after the first one
};

Sent sent_in_step(ProcessGroup& world, HybridStrategy& strategy,
                  std::int64_t step) {
  world.clear_records();
  strategy.step(step);
  Sent sent;
  for (const UpdateBucket& bucket : strategy.update().buckets()) {
    sent.buckets += bucket.data->size() > 1;
  }
  for (const CommRecord& record : world.records()) {
    const bool is_in_backward = record.phase == Phase::kBackward;
    if (record.label == "gradients") {
      ++sent.all;
      sent.in_backward += is_in_backward;
    } else if (sent.in_backward > 0) {
      sent.went_on |= is_in_backward;
    }
  }
  return sent;
}

// Once each: neither before the last micro-batch, nor at both ends of the tied
// embedding.
TEST(HybridOverlap, SendsEachBucketOnceWhileBackwardGoesOn) {
  for (const Case& each : cases()) {
    SCOPED_TRACE(name_of(each.setup));
    const bool has_messages = each.setup.tp > 1;
    for (const auto& steps :
         on_mesh(options_of(each), each.setup,
                 [](ProcessGroup&world, DeviceMesh&, HybridStrategy&all) {
                   const Sent first = sent_in_step(world, all, 0);
                   return std::vector<Sent>{first, sent_in_step(world, all, 1)};
                 })) {
      EXPECT_EQ(steps[0].all, steps[0].buckets);
      EXPECT_EQ(steps[0].in_backward, 0u);
      EXPECT_EQ(steps[1].all, steps[1].buckets);
      EXPECT_EQ(steps[1].in_backward, steps[1].buckets);
      EXPECT_TRUE(steps[1].went_on || !has_messages);
    }
  }
}

// The stages of a rank end their backwards at different times.
TEST(HybridOverlap, FillsABucketInOneStage) {
  HybridOptions setup = {.dp = 2,
                         .pp = 2,
                         .schedule = "interleaved",
                         .micro_batches = 4,
                         .overlap_grad_reduce = true};
  const auto stages =
      on_mesh(nano_options(ranks_of(setup)), setup,
              [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
                std::vector<int> stages;
                for (const UpdateBucket& bucket : strategy.update().buckets()) {
                  if (bucket.tied == nullptr) stages.push_back(bucket.stage);
                }
                return stages;
              });
  EXPECT_EQ(stages.front(), (std::vector<int>{0, 2}));
  EXPECT_EQ(stages.back(), (std::vector<int>{1, 3}));
}

}  // namespace
}  // namespace shardbook::hybrid
