// Virtual time on the cluster `textbook` against the page's closed form.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/11_dtensor/trainer.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {
namespace {

struct MeshCase {
  int d, t;
  const char* data_parallel;
  double batch, micro_batches;
};

/// A GPT of two layers, h = 48, V = 64, on sequences of 32 tokens.
struct MeshStep {
  MeshCase on;
  double h = 48, heads = 12, vocabulary = 64, positions = 40, seq = 32;

  double rows() const { return on.batch / on.d / on.micro_batches; }
  double tokens() const { return rows() * seq; }
  /// Forward, dX, dW: one after the other.
  double product(double k, double n, double cuts) const {
    return 3 * 2 * tokens() * k * n / cuts / kRate;
  }
  /// One use of a parameter: borrowed forward, its gradient returned backward.
  double used(double n) const {
    if (on.data_parallel == std::string("ddp")) return all_reduce(on.d, 4 * n);
    return all_gather(on.d, 4 * n) + reduce_scatter(on.d, 4 * n);
  }
  double block() const {
    const double t = on.t;
    const double products =
        product(h, 3 * h, t) + product(h, h, t) + 2 * product(h, 4 * h, t);
    const double pairs = seq * (seq + 1) / 2 * rows();
    const double attention = 7 * 2 * pairs * h / t / kRate;
    const double parameters =
        used(3 * h * h / t) + used(3 * h / t) + used(h * h / t) + used(h) +
        2 * used(4 * h * h / t) + used(4 * h / t) + used(h) + 4 * used(h);
    return products + attention + parameters +
           4 * all_reduce(on.t, 4 * tokens() * h);
  }
  double step() const {
    const double ends = product(h, vocabulary, 1) + 2 * used(vocabulary * h) +
                        used(positions * h) + 2 * used(h) +
                        2 * all_reduce(on.d, 4);
    return on.micro_batches * (2 * block() + ends) + all_reduce(on.d * on.t, 8);
  }
};

TEST(TextbookDTensor, NothingHides) {
  for (const MeshCase& on :
       {MeshCase{1, 1, "fsdp", 4, 1}, MeshCase{1, 2, "fsdp", 4, 1},
        MeshCase{1, 4, "fsdp", 4, 2}, MeshCase{2, 1, "ddp", 4, 2},
        MeshCase{2, 2, "ddp", 8, 1}, MeshCase{2, 3, "fsdp", 4, 2},
        MeshCase{4, 1, "fsdp", 8, 1}, MeshCase{4, 2, "fsdp", 16, 4}}) {
    SCOPED_TRACE(testing::Message()
                 << on.d << "x" << on.t << " " << on.data_parallel);
    const MeshStep step{on};
    Options options =
        mlp_options(on.d * on.t, static_cast<std::int64_t>(on.batch));
    options.model =
        R"({"n_embd": 48, "n_layer": 2, "n_head": 12, "vocab_size": 64,)"
        R"( "n_positions": 40})";
    options.seq = 32;
    dtensor::TrainerOptions how;
    how.mesh = std::to_string(on.d) + "x" + std::to_string(on.t);
    how.data_parallel = on.data_parallel;
    how.micro_batches = static_cast<std::int64_t>(on.micro_batches);
    const Report report = run_chapter(
        options, [&](const Options& as, ProcessGroup& world, Report& report) {
          DeviceMesh mesh(world, dtensor::topology_of(how, world.size()));
          dtensor::Trainer trainer(as, how, mesh);
          const TrainingLog log =
              train(as, trainer.optimizer(), false,
                    [&](std::int64_t at) { return trainer.step(at); });
          const Bill bill = trainer.bills()[0];
          finish_rank(as, world, log, bill.bytes, bill.memory, report);
        });
    expect_time(report.time.step_s, step.step());
  }
}

}  // namespace
}  // namespace shardbook::textbook
