// The page's table against runs on shapes: bytes, memory, time of a step.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "chapters/08_tensor_parallel_2d/trainer.h"
#include "comm/device_mesh.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"

namespace shardbook::textbook::summa_bill {
namespace {

struct Case {
  int q = 1, d = 1;
  std::int64_t vocabulary = 0, batch = 0;
  Passes passes = {};
};

/// The times of the page, for a micro-batch of these sizes on d squares of side q.
struct StepTime {
  int q, d;
  double tokens, seq, h, layers, vocabulary, batch;
  Passes passes = {};

  /// C = A B: the broadcasts of the next step hide behind the product, or it
  /// behind them.
  double ab(double m, double k, double n) const {
    const double arrives = std::max(broadcast(q, 4 * m * k / (d * q * q)),
                                    broadcast(q, 4 * k * n / (q * q)));
    const double product = product_s(m, k, n);
    return arrives + (q - 1) * std::max(arrives, product) + product;
  }
  /// A block of `in` elements arrives, one of `out` leaves.
  double reduced(double m, double k, double n, double in, double out) const {
    const double arrives = broadcast(q, 4 * in), leaves = broadcast(q, 4 * out);
    const double product = product_s(m, k, n);
    return arrives + product + leaves +
           (q - 1) * std::max({arrives, product, leaves});
  }
  double product_s(double m, double k, double n) const {
    return 2 * m * k * n / (d * q * q * q) / kRate;
  }
  double vector_there(double n) const { return all_gather(q, 4 * n / q); }
  double vector_back(double n) const {
    return all_gather(q, 4 * n / q) + depth(n);
  }
  /// The gradient of n elements of the whole parameter.
  double depth(double n) const { return all_reduce(d, 4 * n / (q * q)); }

  double linear(double k, double n) const {
    const double x = tokens * k / (d * q * q), w = k * n / (q * q);
    return vector_there(n) + ab(tokens, k, n) + reduced(tokens, n, k, w, x) +
           reduced(tokens, k, n, x, w) + depth(k * n) + vector_back(n);
  }
  double norm() const {
    return 2 * all_reduce(q, 8 * tokens / (d * q)) + 2 * vector_there(h) +
           2 * vector_back(h);
  }
  double head() const {
    const double x = tokens * h / (d * q * q), w = vocabulary * h / (q * q);
    const double logits = tokens * vocabulary / (d * q * q);
    return reduced(tokens, h, vocabulary, w, logits) +
           ab(tokens, vocabulary, h) +
           reduced(tokens, vocabulary, h, logits, w) + depth(vocabulary * h) +
           0 * x;
  }
  double embedding() const {
    return 2 * all_gather(q, 4 * tokens * h / (d * q)) + depth(vocabulary * h) +
           vector_there(seq * h) + vector_back(seq * h);
  }
  double loss() const {
    return 3 * all_reduce(q, 4 * tokens / (d * q)) + all_reduce(d * q, 8);
  }
  double linear_forward(double k, double n) const {
    return vector_there(n) + ab(tokens, k, n);
  }
  double attention_forward() const {
    return attention_s(batch / (d * q), 12.0 / q, h / 12, seq);
  }
  double block_forward() const {
    return 2 * (all_reduce(q, 8 * tokens / (d * q)) + 2 * vector_there(h)) +
           linear_forward(h, 3 * h) + linear_forward(h, h) +
           linear_forward(h, 4 * h) + linear_forward(4 * h, h) +
           attention_forward();
  }
  double block() const {
    // Forward counts twice, backward five products more
    return 2 * norm() + linear(h, 3 * h) + linear(h, h) + linear(h, 4 * h) +
           linear(4 * h, h) + 3.5 * attention_forward() +
           (passes.recompute ? block_forward() : 0);
  }
  double step() const {
    return static_cast<double>(passes.micro_batches) *
               (embedding() + layers * block() + norm() + head() + loss()) +
           all_reduce(d * q * q, 8);
  }
};

struct Owner : Strategy {
  DeviceMesh mesh;
  summa::Trainer trainer;

  Owner(const Options& options, ProcessGroup& world, const Case& c)
      : mesh(world, c.d == 1
                        ? summa::square(c.q)
                        : Topology({"dep", "col", "row"}, {c.d, c.q, c.q})),
        trainer(options, summa::grid_of(mesh), world, c.passes) {}
  StepResult step(std::int64_t at) override { return trainer.step(at); }
  Optimizer& optimizer() override { return trainer.optimizer(); }
  std::vector<Bill> bills() override { return trainer.bills(); }
  std::vector<NamedTensor> full_state() override { return {}; }
};

TEST(SummaBill, EqualsARunOnShapes) {
  for (const Case& c :
       {Case{1, 1, 64, 6}, Case{2, 1, 64, 6}, Case{2, 1, 1001, 10},
        Case{3, 1, 50, 9}, Case{4, 1, 4096, 4}, Case{1, 3, 33, 6},
        Case{2, 2, 50, 8}, Case{2, 3, 1000, 12}, Case{3, 2, 64, 6},
        Case{1, 1, 64, 6, {3, true}}, Case{2, 1, 64, 6, {3, false}},
        Case{2, 1, 1001, 10, {1, true}}, Case{3, 1, 50, 18, {2, true}},
        Case{1, 3, 33, 12, {2, true}}, Case{2, 2, 50, 16, {4, true}},
        Case{2, 3, 1000, 12, {2, false}}}) {
    SCOPED_TRACE(testing::Message()
                 << "q " << c.q << " d " << c.d << " V " << c.vocabulary
                 << " m " << c.passes.micro_batches << " recompute "
                 << c.passes.recompute);
    const double m = static_cast<double>(c.passes.micro_batches);
    const Options options = gpt_options(c.d * c.q * c.q, c.vocabulary, c.batch);
    const Report report =
        report_of(options, [&](const Options& as, ProcessGroup& world) {
          return std::make_unique<Owner>(as, world, c);
        });
    expect_claims(report, /*has_activations=*/true);
    const StepTime time{
        c.q,
        c.d,
        static_cast<double>(options.batch * options.seq) / m,
        static_cast<double>(options.seq),
        144,
        2,
        static_cast<double>(padded_vocabulary(c.vocabulary, c.q)),
        static_cast<double>(options.batch) / m,
        c.passes};
    expect_time(report.time.step_s, time.step());
  }
}

// Where the peak lies at the last norm, at the logits, with few tokens; other
// precisions, and dropout.
TEST(SummaBill, ActivationsAreThoseOfThePage) {
  struct Other {
    std::int64_t vocabulary, batch;
    DType dtype;
    double dropout;
    Passes passes = {};
  };
  for (const Other& c :
       {Other{64, 8, DType::kF64, 0}, Other{4000, 8, DType::kF64, 0.1},
        Other{64, 4, DType::kBF16, 0}, Other{4000, 12, DType::kBF16, 0.1},
        Other{64, 8, DType::kF32, 0.1}, Other{50, 2, DType::kF32, 0},
        Other{64, 24, DType::kF64, 0.1, {3, true}},
        Other{64, 16, DType::kBF16, 0.1, {2, true}},
        Other{4000, 8, DType::kBF16, 0, {4, false}},
        Other{5000, 4, DType::kF32, 0.1, {2, true}}}) {
    Options options = gpt_options(4, c.vocabulary, c.batch);
    options.dtype = c.dtype;
    options.dropout = c.dropout;
    expect_claims(report_of(options,
                            [&c](const Options& as, ProcessGroup& world) {
                              return std::make_unique<Owner>(
                                  as, world, Case{2, 1, 0, 0, c.passes});
                            }),
                  /*has_activations=*/true);
  }
}

TEST(SummaBill, OfOneLinearIsThatOfTheLedger) {
  EXPECT_EQ(summa::linear_elements(2, 1, 16, 256, 1024), 199680);
  EXPECT_EQ(summa::linear_elements(2, 1, 16, 256, 1024) +
                summa::linear_elements(2, 1, 16, 1024, 256),
            408576);
}

TEST(SummaBill, RefusesSizesAndNamesTheNext) {
  const auto message = [](Options options) {
    try {
      report_of(options, [&](const Options& as, ProcessGroup& world) {
        DeviceMesh mesh(world, summa::square(2));
        return std::make_unique<summa::Trainer>(as, summa::grid_of(mesh),
                                                world);
      });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message(gpt_options(4, 64, 7))
                .find("--batch 7: the batch is cut into 2 parts; give 8"),
            std::string::npos);
  Options odd = gpt_options(4, 64, 8);
  odd.model = R"({"n_embd": 54, "n_head": 3})";
  EXPECT_NE(message(odd).find("n_head 3: heads are cut into 2 parts; give 4"),
            std::string::npos);
}

TEST(SummaBill, RefusesAWidthThatDividesOnceOnly) {
  Options odd = gpt_options(4, 64, 8);
  odd.model = R"({"n_embd": 54, "n_head": 6})";
  std::string message;
  try {
    report_of(odd, [](const Options& as, ProcessGroup& world) {
      DeviceMesh mesh(world, summa::square(2));
      return std::make_unique<summa::Trainer>(as, summa::grid_of(mesh), world);
    });
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("n_embd 54: vectors are cut into 4 parts; give 56"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace shardbook::textbook::summa_bill
