// The page's table against runs on shapes: bytes, memory, time of a step.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "chapters/10_tensor_parallel_3d/trainer.h"
#include "comm/device_mesh.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"

namespace shardbook::textbook::cube_bill {
namespace {

struct Case {
  int l = 1;
  std::int64_t vocabulary = 0, batch = 0;
  bool keep_gathered = true;
  Passes passes = {};
};

/// The times of the page: operands arrive together, and the sum of dX travels
/// while dW is computed.
struct StepTime {
  int l;
  double tokens, seq, h, layers, vocabulary, batch;
  bool keep_gathered;
  Passes passes = {};

  /// An all_gather or reduce_scatter of one matrix over one axis.
  double moved(double rows, double columns) const {
    return all_gather(l, 4 * rows * columns / (l * l));
  }
  double product(double k, double n) const {
    const double x = moved(tokens, k), w = moved(k, n), y = moved(tokens, n);
    const double once = 2 * tokens * k * n / (l * l * l) / kRate;
    // dX waits for dY and the weight, dW for x too
    const double dx =
        keep_gathered ? y + once : std::max(std::max(y, w) + once, x);
    return std::max(x, w) + once + y + dx + std::max(once, x) + w;
  }
  /// The gradient of a vector's part of n.
  double vector(double n) const { return all_reduce(l * l, 4 * n / l); }
  double linear(double k, double n) const { return product(k, n) + vector(n); }
  double norm() const {
    return 2 * all_reduce(l, 8 * tokens / (l * l)) + 2 * vector(h);
  }
  double product_forward(double k, double n) const {
    return std::max(moved(tokens, k), moved(k, n)) +
           2 * tokens * k * n / (l * l * l) / kRate + moved(tokens, n);
  }
  double attention_forward() const {
    return attention_s(batch / (l * l), 12.0 / l, h / 12, seq);
  }
  double block_forward() const {
    return 2 * all_reduce(l, 8 * tokens / (l * l)) + product_forward(h, 3 * h) +
           product_forward(h, h) + product_forward(h, 4 * h) +
           product_forward(4 * h, h) + attention_forward();
  }
  double block() const {
    return 2 * norm() + linear(h, 3 * h) + linear(h, h) + linear(h, 4 * h) +
           linear(4 * h, h) + 3.5 * attention_forward() +
           (passes.recompute ? block_forward() : 0);
  }
  double step() const {
    const double embedding =
        2 * moved(vocabulary, h) + 2 * moved(tokens, h) + vector(seq * h);
    const double loss =
        3 * all_reduce(l, 4 * tokens / (l * l)) + 2 * all_reduce(l, 8);
    return static_cast<double>(passes.micro_batches) *
               (embedding + layers * block() + norm() + product(h, vocabulary) +
                loss) +
           all_reduce(l * l * l, 8);
  }
};

struct Owner : Strategy {
  DeviceMesh mesh;
  std::unique_ptr<cube::Trainer> trainer;

  Owner(const Options& options, ProcessGroup& world, const Case& c)
      : mesh(world, cube::cube_of(c.l)) {
    cube::Cube place = cube::cube_on(mesh);
    place.keep_gathered = c.keep_gathered;
    trainer = std::make_unique<cube::Trainer>(options, place, world, c.passes);
  }
  StepResult step(std::int64_t at) override { return trainer->step(at); }
  Optimizer& optimizer() override { return trainer->optimizer(); }
  std::vector<Bill> bills() override { return trainer->bills(); }
  std::vector<NamedTensor> full_state() override { return {}; }
};

// 27 ranks included.
TEST(CubeBill, EqualsARunOnShapes) {
  for (const Case& c :
       {Case{1, 64, 6}, Case{2, 64, 8}, Case{2, 1001, 12},
        Case{2, 50, 4, false}, Case{3, 50, 9}, Case{3, 500, 18, false},
        Case{4, 4096, 16}, Case{1, 64, 6, true, {2, true}},
        Case{2, 64, 24, true, {3, false}}, Case{2, 1001, 12, true, {1, true}},
        Case{2, 50, 16, false, {4, true}}, Case{2, 2000, 8, false, {2, false}},
        Case{3, 50, 18, true, {2, true}}}) {
    SCOPED_TRACE(testing::Message()
                 << "l " << c.l << " V " << c.vocabulary << " keep "
                 << c.keep_gathered << " m " << c.passes.micro_batches
                 << " recompute " << c.passes.recompute);
    const auto m = static_cast<double>(c.passes.micro_batches);
    const Options options = gpt_options(c.l * c.l * c.l, c.vocabulary, c.batch);
    const Report report =
        report_of(options, [&](const Options& as, ProcessGroup& world) {
          return std::make_unique<Owner>(as, world, c);
        });
    expect_claims(report, /*has_activations=*/true);
    const StepTime time{
        c.l,
        static_cast<double>(options.batch * options.seq) / m,
        static_cast<double>(options.seq),
        144,
        2,
        static_cast<double>(padded_vocabulary(c.vocabulary, c.l * c.l)),
        static_cast<double>(options.batch) / m,
        c.keep_gathered,
        c.passes};
    expect_time(report.time.step_s, time.step());
  }
}

// Where the peak lies in the last block's MLP, at the logits, at the last norm;
// other precisions, and dropout.
TEST(CubeBill, ActivationsAreThoseOfThePage) {
  struct Other {
    std::int64_t vocabulary, batch;
    DType dtype;
    double dropout;
    Passes passes = {};
  };
  for (const bool keep_gathered : {true, false}) {
    for (const Other& c :
         {Other{64, 8, DType::kF32, 0.1}, Other{64, 8, DType::kF64, 0},
          Other{4000, 8, DType::kF64, 0.1}, Other{4000, 12, DType::kBF16, 0},
          Other{4, 64, DType::kBF16, 0},
          Other{64, 24, DType::kF64, 0.1, {3, true}},
          Other{64, 16, DType::kBF16, 0.1, {2, true}},
          Other{4000, 16, DType::kBF16, 0, {4, false}},
          Other{4000, 8, DType::kF32, 0.1, {2, true}}}) {
      Options options = gpt_options(8, c.vocabulary, c.batch);
      options.dtype = c.dtype;
      options.dropout = c.dropout;
      expect_claims(report_of(options,
                              [&](const Options& as, ProcessGroup& world) {
                                return std::make_unique<Owner>(
                                    as, world,
                                    Case{2, 0, 0, keep_gathered, c.passes});
                              }),
                    /*has_activations=*/true);
    }
  }
}

}  // namespace
}  // namespace shardbook::textbook::cube_bill
