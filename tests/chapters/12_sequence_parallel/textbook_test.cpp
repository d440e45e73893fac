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
  /// Ring attention of one layer on a rank that computes in every step, forward
  /// and backward: products of its first step, and of each other one.
  double ring_s(double own, double other) const {
    const double hop = 2 * message(part_bytes());
    const double forward =
        std::max(2 * own, hop) + (c - 2) * std::max(2 * other, hop) + 2 * other;
    // Gradients of a block leave when it is computed, before the next K and V
    return forward + std::max(5 * own, hop) +
           (c - 2) * std::max(5 * other, 2 * hop) + std::max(5 * other, hop) +
           hop;
  }
  /// Gradients, loss, norm.
  double sums_s() const {
    return all_reduce(c, 4 * parameters()) + all_reduce(c, 8) +
           all_reduce(c, 8);
  }
  Options options() const {
    Options options = mlp_options(c, static_cast<std::int64_t>(b));
    options.model =
        "{\"n_embd\": " + std::to_string(static_cast<int>(h)) +
        ", \"n_layer\": " + std::to_string(static_cast<int>(layers)) +
        ", \"n_head\": " + std::to_string(heads) +
        ", \"vocab_size\": " + std::to_string(static_cast<int>(vocabulary)) +
        ", \"n_positions\": " + std::to_string(static_cast<int>(s)) + "}";
    options.seq = static_cast<std::int64_t>(s);
    return options;
  }
  double counted_s(const SequenceOptions& sequence) const {
    const Report report = run_chapter(
        options(),
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
    expect_time(
        step.counted_s({Kind::kRing, Layout::kZigzag, false}),
        step.dense_s() + step.layers * step.ring_s(own, other) + step.sums_s());
  }
}

TEST(TextbookSequence, ContiguousSlicesTakeAsLongAsTheLastRank) {
  for (const Step& step : steps()) {
    const double c = step.c, n = step.s / c;
    // The last rank's: half of a square, then whole ones
    const double own = step.pairs_s(n * (n + 1) / 2);
    const double other = step.pairs_s(n * n);
    const double attention = step.ring_s(own, other);
    const double counted =
        step.counted_s({Kind::kRing, Layout::kContiguous, false});
    const double hop = 2 * message(step.part_bytes());
    expect_time(counted,
                step.dense_s() + step.layers * attention + step.sums_s());
    // Zigzag shares the pairs: nearly twice as fast, where hops hide behind them
    if (5 * own < 2 * hop || step.b < 2) continue;
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

// Megatron's layers on t = c ranks: all messages are waited for, except those of
// column-parallel layers in backward, which travel beside a product each.
TEST(TextbookSequence, MegatronHidesTwoMessagesOfColumnParallelLayers) {
  for (Step step : steps()) {
    for (const std::int64_t m : {1, 2}) {
      for (const bool recomputes : {false, true}) {
        if (step.b < 2 && m > 1) continue;
        const double micro_batches = static_cast<double>(m), h = step.h;
        const double tokens = step.b * step.s / micro_batches;
        const double x = all_gather(step.c, 4 * tokens * h);
        const auto product = [&](double k, double n) {
          return 2 * tokens * k * n / step.c / kRate;
        };
        const auto column = [&](double n) {
          return x + product(h, n) + 2 * std::max(x, product(h, n));
        };
        const auto row = [&](double k) {
          return product(k, h) + x + x + 2 * product(k, h);
        };
        const double attention = (recomputes ? 9 : 7) *
                                 step.pairs_s(step.s * (step.s + 1) / 2) /
                                 step.c / micro_batches;
        const double layer =
            column(3 * h) + attention + row(h) + column(4 * h) + row(4 * h);
        const double ends = 2 * x + 2 * x + 3 * product(h, step.vocabulary) +
                            3 * all_reduce(step.c, 4 * tokens);
        const double partial = 4 * ((6 * step.layers + 2) * h + step.s * h);
        MegatronOptions how;
        how.recompute_attention = recomputes;
        const Report report = run_chapter(
            step.options(),
            [&](const Options& as, ProcessGroup& world, Report& report) {
              MegatronTrainer trainer(as, how, m, world);
              const TrainingLog log =
                  train(as, trainer.optimizer(), false,
                        [&](std::int64_t step) { return trainer.step(step); });
              const Bill bill = trainer.bills()[0];
              finish_rank(as, world, log, bill.bytes, bill.memory, report);
            });
        expect_time(report.time.step_s,
                    micro_batches * (step.layers * layer + ends) +
                        all_reduce(step.c, partial) + all_reduce(step.c, 8));
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::sequence_parallel
