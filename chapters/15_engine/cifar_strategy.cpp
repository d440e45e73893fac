#include "chapters/15_engine/cifar_strategy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "chapters/13_moe/bill.h"
#include "chapters/13_moe/load.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/replica_sums.h"
#include "chapters/common/sharded/parts.h"
#include "core/autograd.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kTestBatch = 4;
constexpr double kWidth = 84;  // of a token

/// The loss of the images of one rank.
Tensor loss_of(const Options& options, const CifarData& data, std::int64_t step,
               int rank, const std::function<Tensor(const Tensor&)>& forward) {
  const int ranks = options.world_size;
  RandomState& random = RankContext::current().random;
  // Draws are keyed by an image's place in the batch
  random.step = static_cast<std::uint64_t>(step);
  random.batch = {rank, ranks};
  random.next_op = 0;
  const Batch batch =
      cifar_batch(data.training, {step * options.batch + rank, ranks},
                  options.batch / ranks, options.dtype);
  return language_loss(forward(batch.inputs), batch.targets);
}

double gather(double ranks) { return (ranks - 1) / ranks; }

/// The place of the largest of each row's values.
std::vector<std::int64_t> largest(const Tensor& rows) {
  const std::vector<double> values = rows.to_vector<double>();
  const auto width = static_cast<std::ptrdiff_t>(rows.size(1));
  std::vector<std::int64_t> places;
  for (auto row = values.begin(); row != values.end(); row += width) {
    places.push_back(std::max_element(row, row + width) - row);
  }
  return places;
}

}  // namespace

CifarStrategy::CifarStrategy(const Options& options, const CifarOptions& cifar,
                             const CifarData& data, DeviceMesh& mesh)
    : options_(options),
      cifar_(cifar),
      data_(data),
      mesh_(mesh),
      world_(mesh.world()),
      net_(cifar.net, {.ep = &mesh.group("ep")}, record_),
      engine_(engine::initialize(net_, cifar_config(cifar), world_).engine) {}

StepResult CifarStrategy::step(std::int64_t step) {
  const Tensor loss =
      loss_of(options_, data_, step, world_.rank(),
              [&](const Tensor& images) { return (*engine_)(images); });
  engine_->backward(loss);
  engine_->step();
  return engine_->step_result(
      sum_over_ranks(world_, loss.item() / world_.size(), "loss"));
}

double CifarStrategy::accuracy(const CifarImages& images) {
  const NoGrad no_grad;
  const ContextValue<Device> here(&RankContext::device,
                                  net_.conv1_weight.device());
  net_.train(false);
  // All ranks compute equally many batches: experts wait for tokens
  const std::int64_t n = images.size(), stride = kTestBatch * world_.size();
  double correct = 0;
  for (std::int64_t begin = 0; begin < n; begin += stride) {
    const std::int64_t first = begin + kTestBatch * world_.rank();
    const Batch batch =
        cifar_batch(images, {first, 1}, kTestBatch, options_.dtype);
    const auto found = largest(net_(batch.inputs));
    const auto labels = batch.targets.to_vector<std::int64_t>();
    for (std::int64_t i = 0; i < kTestBatch && first + i < n; ++i) {
      correct += found[at(i)] == labels[at(i)] ? 1 : 0;
    }
  }
  net_.train();
  return sum_over_ranks(world_, correct, "accuracy") / static_cast<double>(n);
}

const CifarResults& CifarStrategy::results() {
  if (!results_) {
    // Loads come first: they are of training alone
    results_ = CifarResults{sum_loads(*record_, world_, true)};
    results_->training = accuracy(data_.training);
    results_->test = accuracy(data_.test);
  }
  return *results_;
}

std::string CifarStrategy::remarks() {
  const CifarResults& found = results();
  std::string text;
  const std::vector<int>& experts = cifar_.net.num_experts;
  if (!experts.empty()) {
    text = draw_groups(cifar_groups(cifar_, world_.size()),
                       *std::max_element(experts.begin(), experts.end())) +
           "\n" + draw_loads(found.loads);
  }
  return text + fmt::format(
                    "accuracy {:.1f} % of {} training images, {:.1f} % of {} "
                    "test images\n",
                    100 * found.training, data_.training.size(),
                    100 * found.test, data_.test.size());
}

std::vector<std::pair<std::string, std::string>> CifarStrategy::more() {
  const CifarResults& found = results();
  std::vector<std::pair<std::string, std::string>> keys = {
      {"accuracy", fmt::format(R"({{"training": {}, "test": {}}})",
                               found.training, found.test)}};
  if (!found.loads.empty()) {
    keys.emplace_back("expert_loads", loads_json(found.loads));
  }
  return keys;
}

std::vector<Bill> CifarStrategy::bills() {
  const int w = world_.size(), ep = mesh_.size("ep"), r = w / ep;
  const BillSizes sizes = {.dp = w,
                           .ep = ep,
                           .zero_stage = cifar_.stage,
                           .offload = cifar_.cpu_offload,
                           .skipped = engine_->skipped_steps(),
                           .has_masters = true};
  Parameters here;
  for (const NamedTensor& each : net_.named_parameters()) {
    (is_expert(each.name) ? here.experts : here.dense) +=
        static_cast<double>(each.tensor.numel());
  }
  const auto [dense, experts] = held_parameters(cifar_.net.moe, sizes, here);
  const auto e = static_cast<double>(dtype_bytes(options_.dtype));
  const auto steps = static_cast<double>(options_.steps);
  const auto skipped = static_cast<double>(sizes.skipped);
  Bill bill;

  // Weights once; in each step gradients, under ZeRO also weights
  const double flat = e * (gather(w) * dense + gather(r) * experts);
  bill.bytes = flat + steps * flat +
               (cifar_.stage == 0 ? steps : steps - skipped) * flat;
  // DDP tells all ranks the order of its buckets
  const bool is_ddp = cifar_.stage == 0 && cifar_.net.num_experts.empty();
  if (is_ddp && options_.steps >= 2) {
    bill.bytes += gather(w) * 4 * static_cast<double>(net_.parameters().size());
  }
  // The loss and the norm, which DDP's ranks know without a message
  bill.bytes += steps * 2 * gather(w) * 8 * (is_ddp ? 1 : 2);
  const double tokens = static_cast<double>(options_.batch / w);
  for (const int each : cifar_.net.num_experts) {
    bill.bytes += steps * e *
                  layer_elements(cifar_.net.moe, each,
                                 slots_of_expert(cifar_.net.moe, each, tokens),
                                 kWidth, sizes);
  }

  bill.memory = states_bill(options_, cifar_.net.moe, sizes, here);
  return {bill};
}

ReferenceRun train_cifar_reference(const Options& options,
                                   const CifarOptions& cifar,
                                   const CifarData& data) {
  Options quiet = options;
  quiet.log.clear();
  const int ranks = options.world_size;
  const bool is_f16 = options.dtype == DType::kF16;
  const auto record = std::make_shared<MoeRecord>();
  ConvNet net(cifar.net, {}, record);
  const auto optimizer = make_optimizer(options.optimizer, net.parameters(),
                                        options.optimizer_options);
  optimizer->keep_master_copies();

  // DDP's sums may overflow before they are divided; all others divide first
  const bool sums_first =
      is_f16 && cifar.stage == 0 && cifar.net.num_experts.empty();
  const double divisor = sums_first ? ranks : 1;
  LossScaleOptions scale = cifar_config(cifar).loss_scale();
  scale.scale *= divisor, scale.min_scale *= divisor;
  DynamicLossScaler scaler(scale);
  // An expert has the tokens of ep ranks
  std::vector<int> joint;
  for (const NamedTensor& each : net.named_parameters()) {
    joint.push_back(is_expert(each.name) ? cifar_groups(cifar, ranks).ep : 1);
  }
  ReplicaSums sums(net.parameters(), divisor / ranks, joint);
  return train_yardstick(
      quiet, *optimizer, net.named_parameters(), [&](std::int64_t step) {
        record->loss_scale = is_f16 ? scaler.scale() / divisor : 1;
        StepResult result;
        for (int rank = 0; rank < ranks; ++rank) {
          const Tensor loss =
              loss_of(quiet, data, step, rank,
                      [&](const Tensor& images) { return net(images); });
          autograd::backward(
              {loss}, {Tensor::full({}, record->loss_scale, loss.options())});
          result.loss += loss.item() / ranks;
          sums.take(at(rank + 1));
        }
        sums.give();
        result.grad_norm = is_f16 ? update_unscaled(quiet, *optimizer, scaler)
                                  : update_parameters(quiet, *optimizer);
        result.was_skipped = is_f16 && !std::isfinite(result.grad_norm);
        return result;
      });
}

}  // namespace shardbook::moe
