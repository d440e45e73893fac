#include "chapters/02_ddp/trainer.h"

#include <algorithm>
#include <optional>

#include "chapters/common/models/checkpoint.h"
#include "comm/coalesce.h"
#include "core/check.h"

namespace shardbook::ddp {
namespace {

Options checked(const Options& options, const TrainerOptions& how, int ranks) {
  check_even_batch(options, ranks, how.micro_batches, "--micro-batches");
  SB_CHECK(how.comm_hook == "none" || how.comm_hook == "bf16", "--comm-hook ",
           how.comm_hook, ": give none or bf16");
  return options;
}

}  // namespace

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& dp)
    : options_(checked(options, how, dp.size())),
      how_(how),
      dp_(dp),
      loaded_(build_model(options)),
      data_(Dataset::open(options.data, options.seq, loaded_.config.vocab_size,
                          options.seed)),
      optimizer_(make_optimizer(options.optimizer, loaded_.model->parameters(),
                                options.optimizer_options)),
      ddp_(*loaded_.model, dp, how.ddp) {
  if (how.comm_hook == "bf16") ddp_.register_comm_hook(bf16_compress_hook());
}

StepResult Trainer::step(std::int64_t step) {
  // All but the last micro-batch keep their gradients to themselves
  std::optional<NoSync> no_sync;
  const Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, how_.micro_batches,
      [&](bool is_last) {
        no_sync.reset();
        if (!is_last) no_sync.emplace(ddp_);
      },
      [&](const Tensor& inputs) { return ddp_(inputs); });

  StepResult result;
  result.loss = loss.item();
  result.grad_norm = update_parameters(options_, *optimizer_);
  return result;
}

TrainingState Trainer::state() {
  TrainingState state;
  add_whole(state, state_of(*loaded_.model), *optimizer_);
  return state;
}

std::vector<NamedTensor> Trainer::full_state() {
  if (dp_.rank() != 0) return {};
  return state_of(*loaded_.model);
}

double Trainer::predicted_bytes() const {
  const double d = dp_.size();
  if (d == 1) return 0;
  const auto steps = static_cast<double>(options_.steps);
  const auto parameters = static_cast<double>(loaded_.model->num_parameters());
  const auto tensors = static_cast<double>(loaded_.model->parameters().size());
  const auto element = static_cast<double>(dtype_bytes(options_.dtype));
  const double on_wire = how_.comm_hook == "bf16" ? 2 : element;
  const bool is_static = how_.ddp.static_graph;
  const bool finds_unused = how_.ddp.find_unused_parameters && !is_static;

  // Broadcasts: the weights once, and the order of the buckets
  double broadcast = parameters * element;
  if (options_.steps >= 2 && !finds_unused) broadcast += 4 * tensors;
  // All-reduces: gradients and the loss in each step, and who used what
  double all_reduced = steps * (parameters * on_wire + 8);
  if (finds_unused) all_reduced += steps * 4 * tensors;
  if (is_static && options_.steps >= 1) all_reduced += 4 * tensors;
  return (d - 1) * (broadcast + 2 * all_reduced) / d;
}

MemoryBill Trainer::bill() const {
  const bool is_view = how_.ddp.gradient_as_bucket_view;
  const std::int64_t rows = options_.batch / (dp_.size() * how_.micro_batches);
  // With views, a new gradient is always added to (or put into) one that
  // exists, as it is when micro-batches accumulate
  MemoryBill bill =
      single_device_bill(options_, loaded_.config, rows, /*recompute=*/false,
                         /*accumulates=*/is_view || how_.micro_batches > 1);
  const Tensors parameters = loaded_.model->parameters();
  const auto tensors = static_cast<double>(parameters.size());
  const double all = bill[MemoryKind::kParameter];
  if (is_view) bill[MemoryKind::kGradient] = all;

  // Buckets, or the buffer that the first weights travel in
  const double buckets = is_view ? 0 : all;
  const bool is_static = how_.ddp.static_graph;
  const bool finds_unused = how_.ddp.find_unused_parameters && !is_static;
  const double usage = finds_unused || is_static ? 4 * tensors : 0;
  double peak = buckets;
  if (options_.steps >= 1) {
    double in_flight = 8;
    if (how_.comm_hook == "bf16") {
      in_flight += 2 * all / static_cast<double>(dtype_bytes(options_.dtype));
    }
    peak = buckets + usage + in_flight;
  }
  if (dp_.size() > 1) {
    peak = std::max(peak,
                    static_cast<double>(coalescing_buffer_bytes(parameters)));
    if (options_.steps >= 2 && !finds_unused) {
      peak = std::max(peak, buckets + usage + 4 * tensors);
    }
  }
  bill[MemoryKind::kCommunication] = peak;
  return bill;
}

}  // namespace shardbook::ddp
