// The order of micro-batches: pure functions.

#include "chapters/05_gpipe/gpipe.h"

#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/run/training.h"
#include "core/check.h"

namespace shardbook::gpipe {

pipeline::Schedule schedule(int num_stages, int num_micro_batches) {
  using namespace pipeline::parts;
  pipeline::Schedule schedule = empty("gpipe", num_stages, num_micro_batches);
  for (Actions& list : schedule.actions) {
    for (int b = 0; b < num_micro_batches; ++b) list.push_back(forward(b));
    for (int b = num_micro_batches; b-- > 0;) list.push_back(backward(b));
  }
  return schedule;
}

double idle_share(int num_stages, int num_micro_batches) {
  return static_cast<double>(num_stages - 1) /
         static_cast<double>(num_micro_batches + num_stages - 1);
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

}  // namespace shardbook::gpipe
