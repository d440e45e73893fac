#include "chapters/common/pipeline/feed.h"

#include <utility>

namespace shardbook::pipeline {

LanguageFeed::LanguageFeed(const Options& options, const Dataset& data,
                           std::vector<MicroBatch> pieces, LossFunction loss_of)
    : data_(data),
      rows_per_step_(options.batch),
      dtype_(options.dtype),
      pieces_(std::move(pieces)),
      loss_of_(std::move(loss_of)) {}

Piece LanguageFeed::piece(int micro_batch) const {
  const auto m = static_cast<std::int64_t>(pieces_.size());
  const MicroBatch& rows = pieces_[static_cast<std::size_t>(micro_batch % m)];
  Piece piece;
  piece.step = static_cast<std::uint64_t>(first_step_ + micro_batch / m);
  piece.slice = rows.slice;
  piece.rows = rows.rows;
  piece.share =
      static_cast<double>(rows.rows) / static_cast<double>(rows_per_step_);
  return piece;
}

Batch LanguageFeed::batch(int micro_batch) const {
  const Piece rows = piece(micro_batch);
  return data_.batch(static_cast<std::int64_t>(rows.step), rows_per_step_,
                     rows.slice, rows.rows);
}

Tensors LanguageFeed::inputs(int micro_batch) {
  return {batch(micro_batch).inputs};
}

Tensor LanguageFeed::loss(int micro_batch, const Tensors& outputs) {
  return loss_of_(outputs[0], batch(micro_batch).targets);
}

Tensors LanguageFeed::example(std::int64_t rows) const {
  RankContext on_shapes(Device::meta());
  const RankContext::Scope scope(on_shapes);
  return {data_.batch(0, rows_per_step_, BatchSlice{}, rows).inputs};
}

}  // namespace shardbook::pipeline
