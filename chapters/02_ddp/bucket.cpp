#include "chapters/02_ddp/bucket.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

#include "core/check.h"

namespace shardbook::ddp {
namespace {

/// The bucket that is being filled for a (dtype, device).
struct OpenBucket {
  DType dtype;
  Device device;
  BucketMembers members;
  std::int64_t bytes = 0;
  bool has_closed_one = false;
};

void check_permutation(const std::vector<int>& order, std::size_t count) {
  std::vector<bool> seen(count);
  bool is_permutation = order.size() == count;
  for (const int index : order) {
    const auto i = static_cast<std::size_t>(index);
    is_permutation = is_permutation && index >= 0 && i < count && !seen[i];
    if (is_permutation) seen[i] = true;
  }
  SB_CHECK(is_permutation, "assign_buckets: the order must name each of the ",
           count, " parameters once");
}

}  // namespace

std::vector<BucketMembers> assign_buckets(const std::vector<BucketItem>& items,
                                          const std::vector<int>& order,
                                          const BucketLimits& limits) {
  check_permutation(order, items.size());
  std::vector<BucketMembers> buckets;
  std::vector<OpenBucket> open;
  for (const int index : order) {
    const BucketItem& item = items[static_cast<std::size_t>(index)];
    auto bucket = std::find_if(open.begin(), open.end(), [&](auto& candidate) {
      return candidate.dtype == item.dtype && candidate.device == item.device;
    });
    if (bucket == open.end()) {
      bucket = open.insert(open.end(), {item.dtype, item.device, {}});
    }

    // Append first, then ask whether the bucket is full
    bucket->members.push_back(index);
    bucket->bytes += item.bytes;
    if (bucket->bytes >=
        (bucket->has_closed_one ? limits.other_bytes : limits.first_bytes)) {
      buckets.push_back(std::move(bucket->members));
      *bucket = {item.dtype, item.device, {}, 0, /*has_closed_one=*/true};
    }
  }
  for (OpenBucket& rest : open) {
    if (!rest.members.empty()) buckets.push_back(std::move(rest.members));
  }

  // A bucket can leave when its last member has arrived
  std::vector<std::size_t> place(items.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    place[static_cast<std::size_t>(order[i])] = i;
  }
  std::sort(buckets.begin(), buckets.end(), [&](auto& a, auto& b) {
    return place[static_cast<std::size_t>(a.back())] <
           place[static_cast<std::size_t>(b.back())];
  });
  return buckets;
}

std::vector<BucketMembers> initial_buckets(const std::vector<BucketItem>& items,
                                           const BucketLimits& limits) {
  std::vector<int> definition_order(items.size());
  std::iota(definition_order.begin(), definition_order.end(), 0);
  std::vector<BucketMembers> buckets =
      assign_buckets(items, definition_order, limits);
  std::sort(buckets.begin(), buckets.end(),
            [](auto& a, auto& b) { return a.front() < b.front(); });
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

void Bucket::launch(double divisor, const CommHook& hook, ProcessGroup& group) {
  contents_.divisor = divisor;
  if (hook) {
    finish_ = hook(contents_, group);
    return;
  }
  // Backward goes on while the bucket travels
  auto work = std::make_shared<Work>(
      group.all_reduce(contents_.gradients, ReduceOp::kSum,
                       "bucket " + std::to_string(contents_.index)));
  finish_ = [work] { work->wait(); };
}

void Bucket::wait() {
  if (finish_) finish_();
  finish_ = nullptr;
}

}  // namespace shardbook::ddp
