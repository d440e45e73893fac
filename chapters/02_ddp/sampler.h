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
/// many: the first ones are repeated, or the rest is left out.
class DistributedSampler {
 public:
  /// Throws Error for a rank outside 0..num_ranks-1 or an empty dataset.
  DistributedSampler(std::int64_t num_samples, int num_ranks, int rank,
                     const SamplerOptions& options = {});

  /// Selects the permutation of an epoch; without it all epochs are the same.
  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }
  /// This rank's samples of the epoch, in their order.
  std::vector<std::int64_t> indices() const;
  /// Their number.
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
