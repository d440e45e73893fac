#include "chapters/14_hybrid_3d/full_buckets.h"

#include <algorithm>
#include <utility>

namespace shardbook::hybrid {

FullBuckets::FullBuckets(std::vector<std::size_t> bucket_of,
                         std::size_t num_buckets)
    : bucket_of_(std::move(bucket_of)),
      gradients_(bucket_of_.size()),
      num_incomplete_(num_buckets),
      filled_(num_buckets) {
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    if (std::count(bucket_of_.begin(), bucket_of_.end(), bucket) > 0) {
      order_.push_back(bucket);
    }
  }
}

std::vector<std::size_t> FullBuckets::count(std::size_t parameter) {
  const std::size_t bucket = bucket_of_[parameter];
  if (is_first_step_) {
    gradients_.count_use(parameter);
    filled_[bucket] = ++num_counted_;
    return {};
  }
  if (gradients_.is_last_use(parameter)) num_incomplete_[bucket] -= 1;
  // A full bucket waits for those that leave before it
  const std::size_t first = next_;
  while (next_ < order_.size() && num_incomplete_[order_[next_]] == 0) ++next_;
  return {order_.begin() + static_cast<std::ptrdiff_t>(first),
          order_.begin() + static_cast<std::ptrdiff_t>(next_)};
}

std::vector<std::size_t> FullBuckets::end_step() {
  const std::vector<std::size_t> rest(
      order_.begin() + static_cast<std::ptrdiff_t>(next_), order_.end());
  if (is_first_step_) {
    is_first_step_ = false;
    // A bucket that the last micro-batch does not fill comes last
    for (std::size_t i = 0; i < bucket_of_.size(); ++i) {
      if (!gradients_.is_used(i)) filled_[bucket_of_[i]] = num_counted_ + 1;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](auto a, auto b) { return filled_[a] < filled_[b]; });
  }
  gradients_.expect_uses();
  std::fill(num_incomplete_.begin(), num_incomplete_.end(), 0);
  for (const std::size_t bucket : bucket_of_) num_incomplete_[bucket] += 1;
  next_ = 0;
  return rest;
}

}  // namespace shardbook::hybrid
