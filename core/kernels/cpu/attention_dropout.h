#pragma once

// Dropout on the probabilities of attention. Read by
// core/kernels/cpu/attention*.cpp only.

#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "core/kernels/attention.h"
#include "core/kernels/cpu/attention_block.h"
#include "core/kernels/cpu/random_runs.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cpu {

// The random numbers of dropout's mask.
class Dropout {
 public:
  explicit Dropout(const AttentionArgs& args)
      : args_(args), threshold_(keep_threshold(args.dropout)) {
    if (args.dropout == 0.0) return;
    const GlobalView& view = args.dropout_view;
    SB_CHECK(args.dropout > 0.0 && args.dropout < 1.0, "attention: dropout ",
             args.dropout, "; it lies in [0, 1)");
    const Dims shape = {args.batch, args.heads, args.q_rows, args.k_rows};
    SB_CHECK(view.shape == shape && view.global_shape.size() == 4,
             "attention: the view of dropout must be [batch, heads, q_rows, "
             "k_rows], here ",
             args.batch, ", ", args.heads, ", ", args.q_rows, ", ",
             args.k_rows);
    for (std::size_t d = 0; d < 4; ++d) {
      offset_[d] = view.offset.empty() ? 0 : view.offset[d];
      step_[d] = view.step.empty() ? 1 : view.step[d];
      SB_CHECK(offset_[d] >= 0 && step_[d] >= 1 &&
                   (shape[d] == 0 || offset_[d] + (shape[d] - 1) * step_[d] <
                                         view.global_shape[d]),
               "attention: dim ", d,
               " of the view of dropout leaves the "
               "global size ",
               view.global_shape[d]);
    }
  }

  bool active() const { return args_.dropout != 0.0; }

  // mask[j] = 0 or 1 / (1 - p) for keys [from, from + n) of a row.
  template <typename S>
  void mask(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t from,
            std::int64_t n, S* mask) const {
    const Dims& global = args_.dropout_view.global_shape;
    const std::int64_t at[4] = {b, h, row, from};
    std::uint64_t index = 0;
    for (std::size_t d = 0; d < 4; ++d) {
      index = index * static_cast<std::uint64_t>(global[d]) +
              static_cast<std::uint64_t>(offset_[d] + step_[d] * at[d]);
    }
    std::uint32_t words[kKeyBlock];
    random_run(args_.dropout_key, index, static_cast<std::uint64_t>(step_[3]),
               n, words);
    const S kept = static_cast<S>(1.0 / (1.0 - args_.dropout));
    for (std::int64_t j = 0; j < n; ++j) {
      mask[j] = words[j] >= threshold_ ? kept : S(0);
    }
  }

 private:
  const AttentionArgs& args_;
  std::uint32_t threshold_;
  std::int64_t offset_[4] = {};
  std::int64_t step_[4] = {};
};

}  // namespace shardbook::kernels::cpu
