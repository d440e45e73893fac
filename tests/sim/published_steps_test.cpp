// Published speeds of whole training steps, from the operations of the book's
// own GPT on meta tensors and the cost model. What the chapters do beyond one
// device is simulated by the chapters themselves.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/validate/table.h"
#include "chapters/common/models/models.h"
#include "core/device.h"
#include "sim/cost_model.h"

namespace shardbook::sim {
namespace {

std::string table_file(const std::string& name) {
  return std::string(SHARDBOOK_ROOT) + "/bench/validate/" + name;
}

/// Adds up the time of all operations.
class Stopwatch : public Observer {
 public:
  explicit Stopwatch(const CostModel& costs) : costs_(costs) {}
  void on_op_end(const OpEvent& event) override {
    seconds += costs_.operation(event).seconds;
  }
  double seconds = 0;

 private:
  const CostModel& costs_;
};

struct Sizes {
  int layers, hidden, heads, vocab, seq, micro_batch;
  bool recompute;
  DType dtype = DType::kBF16;
};

/// Forward and backward of one micro-batch on one device. Layers are
/// alike: the time is linear in their number, which two short models tell.
double micro_batch_s(const CostModel& costs, const Sizes& sizes) {
  double seconds[2];
  for (const int layers : {1, 2}) {
    const Device device = Device::meta();
    RankContext context(device);
    const RankContext::Scope scope(context);
    ModelConfig config;
    config.vocab_size = sizes.vocab;
    config.n_positions = sizes.seq;
    config.n_embd = sizes.hidden;
    config.n_layer = layers;
    config.n_head = sizes.heads;
    InitOptions init;
    init.dtype = sizes.dtype;
    Gpt model(config, init);
    set_recompute(model, sizes.recompute);
    const Tensor tokens =
        Tensor::empty({sizes.micro_batch, sizes.seq}, {DType::kI64, device});
    Stopwatch stopwatch(costs);
    context.add_observer(&stopwatch);
    language_loss(model(tokens), tokens).backward();
    context.remove_observer(&stopwatch);
    seconds[layers - 1] = stopwatch.seconds;
  }
  return seconds[0] + (sizes.layers - 1) * (seconds[1] - seconds[0]);
}

/// What PyTorch's checkpoint does not compute again: it stops as soon as it has
/// what backward needs, which the block's last product is not.
double early_stop_s(const CostModel& costs, const Sizes& sizes) {
  const std::int64_t rows = sizes.micro_batch * sizes.seq;
  const std::int64_t h = sizes.hidden;
  const OpEvent product = {"matmul",
                           8.0 * static_cast<double>(rows * h * h),
                           0,
                           Phase::kForward,
                           Device(),
                           DType::kBF16,
                           {rows, h, 4 * h, 1},
                           0,
                           Device()};
  return sizes.layers * costs.operation(product).seconds;
}

struct Errors {
  void add(const std::string& row, double predicted, double published) {
    const double error = predicted / published - 1;
    sum += std::abs(error);
    ++count;
    std::printf("%-44s %8.0f, published %8.0f: %+.1f %%\n", row.c_str(),
                predicted, published, 100 * error);
  }
  double mean() const {
    std::printf("mean error %.1f %% of %d rows\n", 100 * sum / count, count);
    return sum / count;
  }
  double sum = 0;
  int count = 0;
};

std::string row_name(const std::string& model, const Sizes& sizes, int gpus) {
  return model + ", sequence " + std::to_string(sizes.seq) + ", batch " +
         std::to_string(sizes.micro_batch) +
         (gpus > 8 ? ", " + std::to_string(gpus) + " GPUs" : "");
}

// MPT, FSDP within one node, where transfers hide behind the layers.
void expect_mpt(const char* gpu, const char* preset) {
  const CostModel costs(Cluster::read(preset));
  Errors errors;
  for (const validate::Row& row :
       validate::read_table(table_file("mpt_fsdp_a100_h100.csv"))) {
    if (row.text("gpu") != gpu || row.integer("gpus") != 8) continue;
    const Sizes sizes = {row.integer("layers"),
                         row.integer("hidden"),
                         row.integer("heads"),
                         row.integer("vocab"),
                         row.integer("seq_len"),
                         row.integer("micro_batch"),
                         row.text("activation_ckpt") == "True"};
    const double seconds = micro_batch_s(costs, sizes) -
                           (sizes.recompute ? early_stop_s(costs, sizes) : 0);
    errors.add(row_name(row.text("model"), sizes, 8),
               sizes.micro_batch * sizes.seq / seconds,
               row.number("tokens_per_s_per_gpu"));
  }
  EXPECT_GT(errors.count, 30);
  EXPECT_LT(errors.mean(), 0.09);
}

// These rows are what the device is fitted to.
TEST(PublishedSteps, OfMptOnA100With80GbAreWithinNinePerCent) {
  expect_mpt("a100_80gb", "a100-cloud");
}

// And these are not.
TEST(PublishedSteps, OfMptOnA100With40GbAreWithinNinePerCent) {
  expect_mpt("a100_40gb", "a100-40gb-cloud");
}

// Megatron-LM of 2020 on one device, without fused attention.
TEST(PublishedSteps, OfMegatronOnOneDeviceAreWithinTenPerCent) {
  int count = 0;
  for (const validate::Row& row :
       validate::read_table(table_file("megatron_2020_tp_weak_scaling.csv"))) {
    if (row.integer("tp") != 1 || row.integer("dp") != 1) continue;
    Cluster cluster = Cluster::read(
        row.text("hardware") == "DGX-A100" ? "dgx-a100" : "dgx-v100");
    cluster.fused_attention = false;
    const Sizes sizes = {row.integer("layers"),
                         row.integer("hidden"),
                         row.integer("heads"),
                         row.integer("vocab"),
                         row.integer("seq_len"),
                         row.integer("global_batch"),
                         true,
                         DType::kF16};
    Errors errors;
    errors.add(row_name(row.text("hardware"), sizes, 1),
               1e3 * micro_batch_s(CostModel(cluster), sizes),
               row.number("iter_time_ms"));
    EXPECT_LT(errors.mean(), 0.1);
    ++count;
  }
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace shardbook::sim
