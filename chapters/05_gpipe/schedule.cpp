// When which micro-batch: pure functions.

#include <algorithm>

#include "chapters/05_gpipe/gpipe.h"
#include "core/check.h"

namespace shardbook::gpipe {

std::vector<Action> schedule(int num_micro_batches) {
  std::vector<Action> actions;
  for (int b = 0; b < num_micro_batches; ++b) {
    actions.push_back({ActionKind::kForward, b});
  }
  for (int b = num_micro_batches - 1; b >= 0; --b) {
    actions.push_back({ActionKind::kBackward, b});
  }
  return actions;
}

int slot(const Action& action, int stage, int num_stages,
         int num_micro_batches) {
  if (action.kind == ActionKind::kForward) return action.micro_batch + stage;
  return (num_micro_batches + num_stages - 1) +
         (num_micro_batches - 1 - action.micro_batch) +
         (num_stages - 1 - stage);
}

int num_slots(int num_stages, int num_micro_batches) {
  return 2 * (num_micro_batches + num_stages - 1);
}

double idle_share(int num_stages, int num_micro_batches) {
  return static_cast<double>(num_stages - 1) /
         static_cast<double>(num_micro_batches + num_stages - 1);
}

std::string figure(int num_stages, int num_micro_batches) {
  const std::size_t width = 2 + std::to_string(num_micro_batches - 1).size();
  const auto cell = [&](const std::string& text) {
    return std::string(width - text.size(), ' ') + text;
  };
  std::string lines;
  for (int s = 0; s < num_stages; ++s) {
    std::vector<std::string> cells(
        static_cast<std::size_t>(num_slots(num_stages, num_micro_batches)),
        cell("."));
    for (const Action& action : schedule(num_micro_batches)) {
      cells[static_cast<std::size_t>(
          slot(action, s, num_stages, num_micro_batches))] =
          cell((action.kind == ActionKind::kForward ? "F" : "B") +
               std::to_string(action.micro_batch));
    }
    lines += "stage " + std::to_string(s);
    for (const std::string& each : cells) lines += each;
    lines += "\n";
  }
  return lines;
}

Checkpoint checkpoint_from_name(const std::string& name) {
  if (name == "always") return Checkpoint::kAlways;
  if (name == "except_last") return Checkpoint::kExceptLast;
  if (name == "never") return Checkpoint::kNever;
  SB_FAIL("--checkpoint ", name, ": give always, except_last or never");
}

std::vector<Tensors> cut(const Tensors& batch, std::int64_t chunks) {
  SB_CHECK(!batch.empty(), "cut: a mini-batch has at least one tensor");
  for (const Tensor& tensor : batch) {
    SB_CHECK(tensor.ndim() >= 1, "cut: a scalar has no rows to be cut");
    SB_CHECK(tensor.size(0) == batch[0].size(0),
             "cut: tensors of one mini-batch have ", batch[0].size(0), " and ",
             tensor.size(0), " rows; they are cut together");
  }
  std::vector<Tensors> pieces;
  for (const MicroBatch& piece : ceil_micro_batches(batch[0].size(0), chunks)) {
    Tensors views;
    for (const Tensor& tensor : batch) {
      views.push_back(
          tensor.rows_view(piece.slice.first, piece.slice.first + piece.rows));
    }
    pieces.push_back(std::move(views));
  }
  return pieces;
}

PieceShapes trace_pieces(const LayerList& layers,
                         const std::vector<MicroBatch>& pieces,
                         const Tensors& inputs, DType dtype) {
  PieceShapes shapes;
  for (const MicroBatch& piece : pieces) {
    if (shapes.count(piece.rows) != 0) continue;
    Tensors rows;
    for (const Tensor& input : inputs) {
      Shape shape = input.shape();
      shape[0] = piece.rows;
      rows.push_back(Tensor::empty(shape, {input.dtype(), Device::meta()}));
    }
    shapes[piece.rows] = trace_shapes(layers, rows, dtype);
  }
  return shapes;
}

}  // namespace shardbook::gpipe
