#pragma once

// Dropout on the probabilities of attention. Read by
// core/kernels/cpu/attention*.cpp only.

#include <cstddef>
#include <cstdint>

#include "core/kernels/attention.h"
#include "core/kernels/attention_args.h"
#include "core/kernels/cpu/attention_block.h"
#include "core/kernels/cpu/random_runs.h"

namespace shardbook::kernels::cpu {

// The random numbers of dropout's mask.
class Dropout {
 public:
  explicit Dropout(const AttentionArgs& args)
      : args_(args),
        threshold_(keep_threshold(args.dropout)),
        place_(checked_dropout(args)) {}

  bool active() const { return args_.dropout != 0.0; }

  // mask[j] = 0 or 1 / (1 - p) for keys [from, from + n) of a row.
  template <typename S>
  void mask(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t from,
            std::int64_t n, S* mask) const {
    const std::int64_t at[4] = {b, h, row, from};
    std::uint64_t index = 0;
    for (std::size_t d = 0; d < 4; ++d) {
      index = index * place_.global[d] + place_.offset[d] +
              place_.step[d] * static_cast<std::uint64_t>(at[d]);
    }
    std::uint32_t words[kKeyBlock];
    random_run(args_.dropout_key, index, place_.step[3], n, words);
    const S kept = static_cast<S>(1.0 / (1.0 - args_.dropout));
    for (std::int64_t j = 0; j < n; ++j) {
      mask[j] = words[j] >= threshold_ ? kept : S(0);
    }
  }

 private:
  const AttentionArgs& args_;
  std::uint32_t threshold_;
  DropoutPlace place_;
};

}  // namespace shardbook::kernels::cpu
