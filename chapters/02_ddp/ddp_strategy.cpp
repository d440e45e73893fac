#include "chapters/02_ddp/ddp_strategy.h"

#include <optional>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/sharded/loss.h"
#include "core/check.h"

namespace shardbook::ddp {
namespace {

Options checked(const Options& options, const StrategyOptions& setup,
                int ranks) {
  check_even_batch(options, ranks, setup.micro_batches, "--micro-batches");
  SB_CHECK(setup.comm_hook == "none" || setup.comm_hook == "bf16",
           "--comm-hook ", setup.comm_hook, ": give none or bf16");
  return options;
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add({"--bucket-mb", may_differ::kSums}, &setup.ddp.bucket_cap_mb,
           "MiB after which a bucket is full", 1e-6, 1e6);
  line.add({"--first-bucket-mb", may_differ::kSums}, &setup.ddp.first_bucket_mb,
           "the same for the first bucket", 1e-6, 1e6);
  line.add({"--find-unused-parameters", may_differ::kPlace},
           &setup.ddp.find_unused_parameters,
           "look for parameters that a forward does not use");
  line.add({"--gradient-as-bucket-view", may_differ::kPlace},
           &setup.ddp.gradient_as_bucket_view, "gradients lie in the buckets");
  line.add({"--static-graph", may_differ::kPlace}, &setup.ddp.static_graph,
           "every step uses the same parameters equally often");
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "micro-batches per step; only the last one communicates", 1);
  line.add("--comm-hook", &setup.comm_hook, "what travels in place of buckets",
           {"none", "bf16"});
  line.refuse("--accumulate", "this option is called --micro-batches");
  line.refuse("--broadcast-buffers", "the models of this chapter have none");
}

DdpStrategy::DdpStrategy(const Options& options, const StrategyOptions& setup,
                         ProcessGroup& dp)
    : options_(checked(options, setup, dp.size())),
      setup_(setup),
      dp_(dp),
      loaded_(build_model(options)),
      data_(Dataset::open(options, loaded_.config)),
      optimizer_(make_optimizer(options.optimizer, loaded_.model->parameters(),
                                options.optimizer_options)),
      ddp_(*loaded_.model, dp, setup.ddp) {
  if (setup.comm_hook == "bf16") ddp_.register_comm_hook(bf16_compress_hook());
}

StepResult DdpStrategy::step(std::int64_t step) {
  // All but the last micro-batch keep their gradients to themselves
  std::optional<NoSync> no_sync;
  const Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, setup_.micro_batches,
      [&](bool is_last) {
        no_sync.reset();
        if (!is_last) no_sync.emplace(ddp_);
      },
      [&](const Tensor& inputs) { return ddp_(inputs); },
      loss_over_ranks(loaded_.config, *loaded_.model, dp_,
                      setup_.micro_batches));

  StepResult result;
  result.loss = loss.item();
  result.grad_norm = update_parameters(options_, *optimizer_);
  return result;
}

TrainingState DdpStrategy::state() {
  TrainingState state;
  add_whole(state, state_of(*loaded_.model), *optimizer_);
  return state;
}

std::vector<NamedTensor> DdpStrategy::full_state() {
  if (dp_.rank() != 0) return {};
  return state_of(*loaded_.model);
}

std::vector<Bill> DdpStrategy::bills() {
  const std::int64_t pieces = dp_.size() * setup_.micro_batches;
  const DType wire = setup_.comm_hook == "bf16" ? DType::kBF16 : options_.dtype;
  // Each step also all-reduces the loss, and the shares of a balancing loss
  const double d = dp_.size();
  const double bytes =
      predicted_bytes(bill_sizes(*loaded_.model, setup_.ddp, dp_.size(),
                                 options_.steps, wire)) +
      static_cast<double>(options_.steps) *
          (2 * (d - 1) / d * 8 + balancing_bytes(loaded_.config, dp_.size()));

  StepTime step{loaded_.config};
  step.ranks = d;
  step.micro_batches = static_cast<double>(setup_.micro_batches);
  step.rows = static_cast<double>(options_.batch) / d / step.micro_batches;
  step.wire_bytes = static_cast<double>(dtype_bytes(wire));
  return {
      {bytes,
       single_device_bill(options_, loaded_.config, options_.batch / pieces),
       step_s(options_, step, *loaded_.model, ddp_)}};
}

}  // namespace shardbook::ddp
