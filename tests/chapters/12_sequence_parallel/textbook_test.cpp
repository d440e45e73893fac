// Virtual time on the cluster `textbook` against the page's closed forms.

#include <algorithm>

#include "chapters/12_sequence_parallel/trainer.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::sequence_parallel {
namespace {

using namespace textbook;

struct Step {
  int c = 2;
  double b = 1, s = 1024, h = 64, layers = 2, vocabulary = 32;
  std::int64_t heads = 8;

  double parameters() const {
    return vocabulary * h + s * h + layers * (12 * h * h + 13 * h) + 2 * h;
  }
  /// Products outside attention, forward and backward.
  double dense_s() const {
    return 3 * (24 * h * h * layers + 2 * h * vocabulary) * b * s / c / kRate;
  }
  /// One product of attention: p pairs of query and key, all heads.
  double pairs_s(double p) const { return 2 * p * h * b / kRate; }
  /// A part of K: b s h / c elements of f32.
  double part_bytes() const { return 4 * b * s * h / c; }
  /// Gradients, loss, norm.
  double sums_s() const {
    return all_reduce(c, 4 * parameters()) + all_reduce(c, 8) +
           all_reduce(c, 8);
  }
  double counted_s(const SequenceOptions& sequence) const {
    Options options = mlp_options(c, static_cast<std::int64_t>(b));
    options.model =
        "{\"n_embd\": " + std::to_string(static_cast<int>(h)) +
        ", \"n_layer\": " + std::to_string(static_cast<int>(layers)) +
        ", \"n_head\": " + std::to_string(heads) +
        ", \"vocab_size\": " + std::to_string(static_cast<int>(vocabulary)) +
        ", \"n_positions\": " + std::to_string(static_cast<int>(s)) + "}";
    options.seq = static_cast<std::int64_t>(s);
    const Report report = run_chapter(
        options,
        [&](const Options& as, ProcessGroup& world, Report& report) {
          Trainer trainer(as, {sequence, 1}, world);
          const TrainingLog log =
              train(as, trainer.optimizer(), false,
                    [&](std::int64_t step) { return trainer.step(step); });
          const Bill bill = trainer.bills()[0];
          finish_rank(as, world, log, bill.bytes, bill.memory, report);
        },
        fold_class(sequence));
    return report.time.step_s;
  }
};

std::vector<Step> steps() {
  std::vector<Step> all;
  for (int c : {2, 4, 8}) {
    for (double s : {256, 16384}) {
      for (double b : {1, 16}) {
        Step step;
        step.c = c, step.s = s, step.b = b;
        all.push_back(step);
      }
    }
  }
  return all;
}

TEST(TextbookSequence, UlyssesWaitsForEightExchanges) {
  for (const Step& step : steps()) {
    const double c = step.c;
    expect_time(
        step.counted_s({Kind::kUlysses, Layout::kContiguous, false}),
        step.dense_s() +
            step.layers * 7 * step.pairs_s(step.s * (step.s + 1) / 2) / c +
            step.layers * 8 *
                ((c - 1) * kLatency +
                 (c - 1) / c * step.part_bytes() / kBandwidth) +
            step.sums_s());
  }
}

TEST(TextbookSequence, RingsHideHopsBehindBlocks) {
  for (const Step& step : steps()) {
    const double c = step.c, n = step.s / c;
    const double half = n / 2;
    // Products of the first step, and of each other one
    const double own = step.pairs_s(2 * half * half + half);
    const double other = step.pairs_s(2 * half * half);
    const double hop = 2 * message(step.part_bytes());
    const double forward =
        std::max(2 * own, hop) + (c - 2) * std::max(2 * other, hop) + 2 * other;
    // Gradients of a block leave when it is computed, before the next K and V
    const double backward = std::max(5 * own, hop) +
                            (c - 2) * std::max(5 * other, 2 * hop) +
                            std::max(5 * other, hop) + hop;
    expect_time(
        step.counted_s({Kind::kRing, Layout::kZigzag, false}),
        step.dense_s() + step.layers * (forward + backward) + step.sums_s());
  }
}

TEST(TextbookSequence, ContiguousSlicesTakeAsLongAsTheLastRank) {
  for (const Step& step : steps()) {
    const double c = step.c, n = step.s / c;
    // Where hops hide behind zigzag's steps as well
    const double hops = 4 * message(step.part_bytes());
    if (5 * step.pairs_s(n * n / 2) < hops || step.b < 2) continue;
    const double last =
        step.pairs_s(n * (n + 1) / 2) + (c - 1) * step.pairs_s(n * n);
    const double bound =
        step.dense_s() + step.layers * 7 * last + step.sums_s();
    const double counted =
        step.counted_s({Kind::kRing, Layout::kContiguous, false});
    EXPECT_GE(counted, bound);
    // Beside it, some of the hops that bring gradients home
    EXPECT_LE(counted, bound + step.layers * hops);
    // Zigzag shares the pairs: nearly twice as fast on many ranks
    EXPECT_LT(step.counted_s({Kind::kRing, Layout::kZigzag, false}),
              step.dense_s() + 0.75 * (counted - step.dense_s()));
  }
}

TEST(TextbookSequence, RsaComputesAllPairsAndWaitsForTwoSums) {
  for (const Step& step : steps()) {
    const double c = step.c, n = step.s / c;
    const double block = step.pairs_s(n * n);
    const double ring =
        (c - 1) * std::max(block, message(step.part_bytes())) + block;
    const double sum =
        c * block + reduce_scatter(step.c, c * step.part_bytes());
    expect_time(
        step.counted_s({Kind::kRsa, Layout::kContiguous, false}),
        step.dense_s() + step.layers * (4 * ring + 2 * sum) + step.sums_s());
  }
}

}  // namespace
}  // namespace shardbook::sequence_parallel
