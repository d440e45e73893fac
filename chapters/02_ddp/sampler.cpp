#include "chapters/02_ddp/sampler.h"

#include <numeric>
#include <random>
#include <utility>

#include "core/check.h"

namespace shardbook::ddp {

DistributedSampler::DistributedSampler(std::int64_t num_samples, int num_ranks,
                                       int rank, const SamplerOptions& options)
    : num_samples_(num_samples),
      num_ranks_(num_ranks),
      rank_(rank),
      options_(options) {
  SB_CHECK(num_samples >= 1, "sampler: ", num_samples,
           " samples; give at least one");
  SB_CHECK(rank >= 0 && rank < num_ranks, "sampler: rank ", rank, " of ",
           num_ranks, " ranks; ranks are 0 to ", num_ranks - 1);
  size_ = options.drop_last ? num_samples / num_ranks
                            : (num_samples + num_ranks - 1) / num_ranks;
}

std::vector<std::int64_t> DistributedSampler::indices() const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_samples_));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  if (options_.shuffle) {
    // Every rank draws the same permutation. The generator is defined by the
    // standard; std::shuffle is not.
    std::mt19937_64 random(options_.seed + static_cast<std::uint64_t>(epoch_));
    for (std::size_t i = order.size() - 1; i > 0; --i) {
      std::swap(order[i], order[random() % (i + 1)]);
    }
  }

  // Deal it out, and start over at the end
  std::vector<std::int64_t> mine;
  for (std::int64_t i = 0; i < size_; ++i) {
    const std::int64_t position = (rank_ + i * num_ranks_) % num_samples_;
    mine.push_back(order[static_cast<std::size_t>(position)]);
  }
  return mine;
}

}  // namespace shardbook::ddp
