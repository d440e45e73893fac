// Uneven inputs: ranks with different numbers of batches.

#include <algorithm>
#include <numeric>

#include "chapters/02_ddp/ddp.h"
#include "comm/coalesce.h"
#include "core/check.h"

namespace shardbook::ddp {

int DistributedDataParallel::JoinStatus::num_active() const {
  return std::accumulate(has_samples.begin(), has_samples.end(), 0);
}

int DistributedDataParallel::JoinStatus::first_active() const {
  return static_cast<int>(std::find(has_samples.begin(), has_samples.end(), 1) -
                          has_samples.begin());
}

DistributedDataParallel::JoinStatus DistributedDataParallel::agree_on_status(
    bool has_samples) {
  // One flag per rank, and the number of ranks that will reduce
  std::vector<std::int32_t> flags(static_cast<std::size_t>(group_.size() + 1));
  flags[static_cast<std::size_t>(group_.rank())] = has_samples;
  flags.back() = has_samples && will_reduce();
  MemoryScope kind(MemoryKind::kCommunication);
  const Tensor message = Tensor::from_values<std::int32_t>(
      flags, {static_cast<std::int64_t>(flags.size())});
  group_.all_reduce(message, ReduceOp::kSum, "join").wait();
  JoinStatus status{message.to_vector<std::int32_t>()};
  status.num_reducing = status.has_samples.back();
  status.has_samples.pop_back();
  return status;
}

double DistributedDataParallel::join_divisor() const {
  return divides_by_initial_world_size_ ? group_.size() : status_.num_active();
}

void DistributedDataParallel::join(const std::function<void()>& body,
                                   bool divide_by_initial_world_size) {
  is_joining_ = true;
  divides_by_initial_world_size_ = divide_by_initial_world_size;
  body();
  reducer_->check_finished();

  // Answer the others' calls until nobody has samples
  for (;;) {
    const JoinStatus status = agree_on_status(false);
    if (status.num_active() == 0) break;
    status_ = status;
    shadow_one_forward();
  }
  is_joining_ = false;

  // The last rank that trained has the final weights
  if (!status_.has_samples.empty()) {
    const int root = status_.first_active();
    broadcast_coalesced(group_, module_.parameters(), root, "parameters");
    broadcast_coalesced(group_, module_.buffers(), root, "buffers");
  }
  last_forward_synced_ = true;
}

void DistributedDataParallel::shadow_one_forward() {
  reducer_->rebuild_buckets();
  if (last_forward_synced_) broadcast_buffers(status_.first_active());
  const int num_reducing = status_.num_reducing;
  SB_CHECK(num_reducing == 0 || num_reducing == status_.num_active(),
           "ddp: ", num_reducing, " of ", status_.num_active(),
           " ranks are about to reduce; "
           "no_sync must cover the same steps on all ranks");
  last_forward_synced_ = num_reducing > 0;
  if (num_reducing > 0) reducer_->reduce_zeros(join_divisor());
}

}  // namespace shardbook::ddp
