#pragma once

// Which samples a rank sees.

#include <cstdint>
#include <vector>

namespace shardbook::ddp {

struct SamplerOptions {
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Leaves out the last samples that do not fill a round, instead of
  /// repeating the first ones.
  bool drop_last = false;
};

/// Deals a dataset out to d ranks: rank r gets entries r, r + d, r + 2d, ... of
/// a permutation that all ranks draw from seed + epoch. Every rank gets equally
/// many: by repetition from the beginning, or by leaving out the rest.
class DistributedSampler {
 public:
  /// Throws Error for a rank outside 0..num_ranks-1 or an empty dataset.
  DistributedSampler(std::int64_t num_samples, int num_ranks, int rank,
                     const SamplerOptions& options = {});

  /// Another permutation for each epoch; without it every epoch is the same.
  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }
  /// This rank's samples of the epoch, in their order.
  std::vector<std::int64_t> indices() const;
  /// How many those are.
  std::int64_t size() const { return size_; }

 private:
  std::int64_t num_samples_;
  int num_ranks_;
  int rank_;
  SamplerOptions options_;
  std::int64_t epoch_ = 0;
  std::int64_t size_;
};

}  // namespace shardbook::ddp
