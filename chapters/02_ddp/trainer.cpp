#include "chapters/02_ddp/trainer.h"

#include <algorithm>
#include <optional>

#include "chapters/02_ddp/coalesce.h"
#include "core/autograd.h"
#include "core/check.h"
#include "sim/repeat.h"

namespace shardbook::ddp {
namespace {

Options checked(const Options& options, const TrainerOptions& how, int ranks) {
  SB_CHECK(options.batch % ranks == 0, "--batch ", options.batch,
           ": does not divide by --world-size ", ranks,
           "; a mean over ranks is the mean over samples only where all ranks "
           "have equally many");
  SB_CHECK(options.batch % (ranks * how.accumulate) == 0, "--accumulate ",
           how.accumulate, ": a rank's ", options.batch / ranks,
           " samples do not divide into so many equal micro-batches");
  SB_CHECK(how.comm_hook == "none" || how.comm_hook == "bf16", "--comm-hook ",
           how.comm_hook, ": give none or bf16");
  return options;
}

}  // namespace

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& world)
    : options_(checked(options, how, world.size())),
      how_(how),
      world_(world),
      loaded_(build_model(options)),
      data_(Dataset::open(options.data, options.seq, loaded_.config.vocab_size,
                          options.seed)),
      optimizer_(make_optimizer(options.optimizer, loaded_.model->parameters(),
                                options.optimizer_options)),
      ddp_(*loaded_.model, world, how.ddp) {
  if (how.comm_hook == "bf16") ddp_.register_comm_hook(bf16_compress_hook());
}

StepResult Trainer::step(std::int64_t step) {
  const std::int64_t d = world_.size(), g = how_.accumulate;
  RandomState& random = RankContext::current().random;
  Tensor mean_loss;
  Work loss_work;
  double local_loss = 0;
  sim::repeat(world_, g, [&](std::int64_t i) {
    // All but the last micro-batch keep their gradients to themselves
    std::optional<NoSync> no_sync;
    if (i + 1 < g) no_sync.emplace(ddp_);

    // Take every d-th sample, and draw dropout at their global positions
    const Batch batch = data_.batch(
        step, options_.batch, BatchSlice{world_.rank() + d * i, d * g},
        options_.batch / (d * g));
    random.batch = batch.slice;
    random.next_op = 0;

    const Tensor loss = language_loss(ddp_(batch.inputs), batch.targets);
    local_loss += loss.item() / static_cast<double>(g);
    if (i + 1 == g) {
      // The loss travels while backward runs
      MemoryScope kind(MemoryKind::kCommunication);
      mean_loss = Tensor::full({}, local_loss / static_cast<double>(d),
                               {DType::kF64, Device()});
      loss_work = world_.all_reduce(mean_loss, ReduceOp::kSum, "loss");
    }
    // DDP divides by d; the g micro-batches are ours to divide
    const double share = 1 / static_cast<double>(g);
    autograd::backward({loss}, {Tensor::full({}, share, loss.options())});
  });
  random.batch = BatchSlice{};
  loss_work.wait();

  StepResult result;
  result.loss = mean_loss.item();
  result.grad_norm = update_parameters(options_, *optimizer_);
  return result;
}

double Trainer::predicted_bytes() const {
  const double d = world_.size();
  if (d == 1) return 0;
  const auto steps = static_cast<double>(options_.steps);
  const auto parameters =
      static_cast<double>(loaded_.model->num_parameters());
  const auto tensors =
      static_cast<double>(loaded_.model->parameters().size());
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
  const std::int64_t rows =
      options_.batch / (world_.size() * how_.accumulate);
  // With views, a new gradient is always added to (or put into) one that
  // exists, as it is when micro-batches accumulate
  MemoryBill bill =
      single_device_bill(options_, loaded_.config, rows, /*recompute=*/false,
                         /*accumulates=*/is_view || how_.accumulate > 1);
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
  if (world_.size() > 1) {
    peak = std::max(
        peak, static_cast<double>(coalescing_buffer_bytes(parameters)));
    if (options_.steps >= 2 && !finds_unused) {
      peak = std::max(peak, buckets + usage + 4 * tensors);
    }
  }
  bill[MemoryKind::kCommunication] = peak;
  return bill;
}

}  // namespace shardbook::ddp
