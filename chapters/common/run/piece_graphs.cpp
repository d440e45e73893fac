#include "chapters/common/run/piece_graphs.h"

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/tensor_storage.h"

namespace shardbook {

void check_cuda_graphs(const Options& options) {
  SB_CHECK(options.device == "cuda", "--cuda-graphs: only with --device cuda");
  SB_CHECK(options.dropout == 0, "--cuda-graphs: --dropout ", options.dropout,
           " draws another mask in each step, and a graph would repeat one; "
           "give --dropout 0");
  SB_CHECK(options.trace.empty(), "--cuda-graphs: --trace ", options.trace,
           " watches each operation, and a graph launches them as a whole; "
           "leave one of them out");
  refuse_image_models(options,
                      "--cuda-graphs is for language models: convolutions "
                      "choose algorithms, and batch norm counts steps on the "
                      "host");
  SB_CHECK(ModelConfig::read(options.model).llama.num_experts == 0,
           "--cuda-graphs: the host chooses the experts of --model ",
           options.model,
           " in each step, and a graph would repeat one choice; leave it out");
}

PieceGraphs::PieceGraphs(const Options& options, Module& model,
                         const Dataset& data)
    : options_(options), model_(model), data_(data) {}

// Gathers the rows in the host's memory: the device holds one batch, as without
// graphs.
void PieceGraphs::load(std::int64_t step, const MicroBatch& piece,
                       double factor) {
  RankContext& context = RankContext::current();
  Batch batch;
  {
    const ContextValue<Device> gathering(&RankContext::device, context.host());
    batch = data_.batch(step, options_.batch, piece.slice, piece.rows);
  }
  if (!inputs_.defined()) {
    const MemoryScope kind(MemoryKind::kInput);
    const TensorOptions here = {batch.inputs.dtype(), context.device};
    inputs_ = Tensor::empty(batch.inputs.shape(), here);
    targets_ = Tensor::empty(batch.targets.shape(), here);
  }
  inputs_.rows_view(0, piece.rows).copy_from(batch.inputs);
  targets_.rows_view(0, piece.rows).copy_from(batch.targets);
  if (!start_.defined()) {
    const MemoryScope kind(MemoryKind::kWorkspace);
    const bool is_wide = options_.dtype == DType::kF64;
    start_ = Tensor::empty(
        {}, {is_wide ? DType::kF64 : DType::kF32, context.device});
  }
  start_.fill(factor);
}

Tensor PieceGraphs::compute(std::int64_t rows) const {
  const Tensor loss = cross_entropy(model_(inputs_.rows_view(0, rows)),
                                    targets_.rows_view(0, rows));
  note_kept_activations();
  autograd::backward({loss}, {start_});
  return loss;
}

Tensor PieceGraphs::launch(std::int64_t rows, bool is_first) {
  Piece& piece = pieces_[{rows, is_first}];
  if (!piece.graph) {
    record(piece, rows);
  } else if (is_first) {
    for (const auto& [parameter, gradient] : gradients_) {
      parameter.set_grad(gradient);
    }
  }
  piece.graph->launch();
  return piece.loss;
}

void PieceGraphs::record(Piece& piece, std::int64_t rows) {
  piece.graph.emplace([&] { piece.loss = compute(rows); }, first_);
  // The loss outlives the step: its bytes are no longer the step's
  set_memory_kind(piece.loss, MemoryKind::kWorkspace);
  if (first_ != nullptr) return;
  first_ = &*piece.graph;
  for (const NamedTensor& parameter : model_.named_parameters()) {
    gradients_.emplace_back(parameter.tensor, parameter.tensor.grad());
  }
}

// The first piece has the most rows.
double PieceGraphs::accumulate(std::int64_t step,
                               std::int64_t num_micro_batches,
                               double loss_scale) {
  bool creates_gradients = true;
  const double mean_loss = accumulate_pieces(
      options_, model_,
      strided_micro_batches(options_.batch, num_micro_batches), loss_scale,
      [&](const MicroBatch& piece, double factor) {
        load(step, piece, factor);
        const bool is_first = std::exchange(creates_gradients, false);
        const Tensor loss =
            has_warmed_up_ ? launch(piece.rows, is_first) : compute(piece.rows);
        note_local_loss(loss);
        return loss.item();
      });
  has_warmed_up_ = true;
  return mean_loss;
}

}  // namespace shardbook
