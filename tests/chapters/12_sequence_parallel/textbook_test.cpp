// Closed forms of a step on the cluster `textbook`, where messages are long beside
// products, and short.

#include <string>

#include "chapters/12_sequence_parallel/trainer.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::sequence_parallel {
namespace {

/// `batch` sequences of s tokens, on c ranks.
struct Shape3 {
  int c;
  std::int64_t s, batch;
};

std::vector<Shape3> shapes() {
  std::vector<Shape3> all;
  for (int c : {2, 4, 8}) {
    for (std::int64_t s : {256, 16384}) {
      for (std::int64_t batch : {1, 16}) all.push_back({c, s, batch});
    }
  }
  return all;
}

Options options_of(const Shape3& shape) {
  Options options = textbook::mlp_options(shape.c, shape.batch);
  options.model =
      R"({"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 32,)"
      R"( "n_positions": )" +
      std::to_string(shape.s) + "}";
  options.seq = shape.s;
  return options;
}

void expect_bill(const Report& report) {
  sharded_test::expect_bill(report);
  textbook::expect_closed_form(report);
}

Report report_of(const Shape3& shape, const SequenceOptions& how) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world,
                     shardbook::Run& run) {
    Trainer strategy(as, {how, 1}, world);
    run.train(as, strategy);
  };
  chapter.fold_class = fold_class(how);
  return run_and_compare(options_of(shape), chapter);
}

TEST(TextbookSequence, StepsTakeThePagesForms) {
  for (const Shape3& shape : shapes()) {
    SCOPED_TRACE(testing::Message() << "c " << shape.c << " s " << shape.s
                                    << " b " << shape.batch);
    expect_bill(report_of(shape, {Kind::kUlysses, Layout::kContiguous, false}));
    expect_bill(report_of(shape, {Kind::kRsa, Layout::kContiguous, false}));
    expect_bill(report_of(shape, {Kind::kRsa, Layout::kContiguous, true}));
    expect_bill(report_of(shape, {Kind::kRing, Layout::kStriped, false}));
    const Report slices =
        report_of(shape, {Kind::kRing, Layout::kContiguous, false});
    const Report zigzag =
        report_of(shape, {Kind::kRing, Layout::kZigzag, false});
    expect_bill(slices);
    expect_bill(zigzag);
    // Zigzag shares the pairs: faster where hops hide behind them
    if (shape.s > 256 && shape.batch > 1) {
      EXPECT_LT(zigzag.time.step_s, 0.9 * slices.time.step_s);
    }
  }
}

TEST(TextbookSequence, MegatronsStepTakesThePagesForm) {
  for (const Shape3& shape : shapes()) {
    for (const bool recomputes : {false, true}) {
      ChapterRun chapter;
      chapter.rank = [&](const Options& as, ProcessGroup& world,
                         shardbook::Run& run) {
        MegatronTrainer strategy(as, {recomputes}, shape.batch > 1 ? 3 : 1,
                                 world);
        run.train(as, strategy);
      };
      expect_bill(run_and_compare(options_of(shape), chapter));
    }
  }
}

}  // namespace
}  // namespace shardbook::sequence_parallel
