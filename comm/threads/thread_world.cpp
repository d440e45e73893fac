#include "comm/threads/thread_world.h"

#include <algorithm>

#include "comm/internal/arguments.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// Below this many bytes read and written, waking a helper takes longer than
// doing the work.
constexpr std::int64_t kSmallBytes = 512 << 10;

// Ranks are threads: each has a condition variable.
class ThreadSleeper : public Sleeper {
 public:
  explicit ThreadSleeper(int world_size)
      : wake_(static_cast<std::size_t>(world_size)) {}
  std::cv_status sleep(
      int world_rank, std::unique_lock<std::mutex>& lock,
      std::chrono::steady_clock::time_point deadline) override {
    return wake_[static_cast<std::size_t>(world_rank)].wait_until(lock,
                                                                  deadline);
  }
  void wake(int world_rank) override {
    wake_[static_cast<std::size_t>(world_rank)].notify_all();
  }

 private:
  std::vector<std::condition_variable> wake_;
};

}  // namespace

ThreadWorld::ThreadWorld(int world_size, int num_cores,
                         std::unique_ptr<Sleeper> sleeper,
                         bool rendezvous_sends)
    : num_cores_(num_cores),
      rendezvous_sends_(rendezvous_sends),
      sleeper_(sleeper ? std::move(sleeper)
                       : std::make_unique<ThreadSleeper>(world_size)),
      root_(std::make_unique<SharedGroup>()) {
  for (int r = 0; r < world_size; ++r) {
    ranks_.push_back(std::make_unique<Rank>());
  }
  root_->name = "world";
  root_->ranks = ranks_below(world_size);
}

ThreadWorld::~ThreadWorld() {
  {
    const Lock lock(mutex_);
    stops_ = true;
  }
  wake_worker_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

SharedGroup& ThreadWorld::find_group(SharedGroup& parent,
                                     const std::vector<int>& members,
                                     std::size_t index,
                                     const std::string& name) {
  const Lock lock(mutex_);
  auto& same = parent.made[members];
  while (same.size() <= index) {
    auto group = std::make_unique<SharedGroup>();
    group->name = name;
    for (int member : members) {
      group->ranks.push_back(parent.ranks[static_cast<std::size_t>(member)]);
    }
    same.push_back(std::move(group));
  }
  return *same[index];
}

// --- Calls -------------------------------------------------------------------

void ThreadWorld::begin_call(int world_rank, const Slot& slot,
                             const SharedGroup& group) {
  Rank& me = rank(world_rank);
  if (me.thread != std::this_thread::get_id()) me.has_several_threads = true;
  if (!failed()) return;  // the text is made for a failure alone
  throw_if_failed(world_rank, slot_text(slot) + " over '" + group.name + "'");
}

void ThreadWorld::throw_if_failed(int world_rank, const std::string& call) {
  if (!failed()) return;
  throw Error(failure_text(failed_rank_, failure_reason_, world_rank, call));
}

void ThreadWorld::match(Operation& operation, int index, int world_rank,
                        Slot slot) {
  const std::string wrong = operation.mismatch(index, slot);
  if (!wrong.empty()) poison_and_throw(world_rank, wrong);
  operation.arrive(index, std::move(slot));
}

std::shared_ptr<Operation> ThreadWorld::arrive(SharedGroup& group,
                                               int group_rank,
                                               std::uint64_t index, Slot slot) {
  Lock lock(mutex_);
  const int me = group.ranks[static_cast<std::size_t>(group_rank)];
  begin_call(me, slot, group);
  const auto position = static_cast<std::size_t>(index - group.first);
  while (group.queue.size() <= position) {
    group.queue.push_back(
        std::make_shared<Operation>(group.ranks, group.name, &group));
  }
  std::shared_ptr<Operation> operation = group.queue[position];
  match(*operation, group_rank, me, std::move(slot));
  if (operation->complete() && position == 0) ready_.push_back(operation);
  run_ready(lock);
  return operation;
}

std::shared_ptr<Operation> ThreadWorld::exchange_message(SharedGroup& group,
                                                         int group_rank,
                                                         Slot slot) {
  Lock lock(mutex_);
  const int me = group.ranks[static_cast<std::size_t>(group_rank)];
  begin_call(me, slot, group);
  const bool is_send = slot.call.op == CommOp::kSend;
  const int peer = slot.call.root_or_peer;
  const int source = is_send ? group_rank : peer;
  const int target = is_send ? peer : group_rank;
  const int index = is_send ? 0 : 1;
  const auto entry =
      group.messages.try_emplace({source, target, slot.call.tag}).first;
  auto& waiting = entry->second;

  // The first message that waits for this side, or a new one.
  const auto side = static_cast<std::size_t>(index);
  if (!waiting.empty() && !waiting.front()->slots[side].arrived) {
    std::shared_ptr<Operation> operation = waiting.front();
    match(*operation, index, me, std::move(slot));
    waiting.pop_front();
    // Tags may be new every time
    if (waiting.empty()) group.messages.erase(entry);
    ready_.push_back(operation);
    run_ready(lock);
    return operation;
  }
  auto operation = std::make_shared<Operation>(
      std::vector<int>{group.ranks[static_cast<std::size_t>(source)],
                       group.ranks[static_cast<std::size_t>(target)]},
      group.name);
  const std::int64_t bytes =
      slot.call.numel * static_cast<std::int64_t>(dtype_bytes(slot.call.dtype));
  const bool is_eager = is_send && bytes <= kEagerBytes && !rendezvous_sends_;
  // A message from a GPU brings its copy.
  if (is_eager && bytes > 0 && slot.eager.empty()) {
    const char* data = static_cast<const char*>(slot.input);
    slot.eager.assign(data, data + bytes);
    slot.input = slot.eager.data();
  }
  operation->arrive(index, std::move(slot));
  waiting.push_back(operation);
  return is_eager ? nullptr : operation;
}

void ThreadWorld::wait(Operation& operation, int world_rank,
                       std::chrono::milliseconds timeout) {
  if (operation.done.load(std::memory_order_acquire)) return;
  Lock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Rank& me = rank(world_rank);
  if (me.thread != std::this_thread::get_id()) me.has_several_threads = true;
  while (!operation.done) {
    throw_if_failed(world_rank, operation.text_of(world_rank));
    if (operation.is_open && operation.has_tasks_to_take() &&
        operation.num_helpers < num_cores_) {
      help(operation, lock);
      run_ready(lock);
      continue;
    }
    ++me.num_blocked;
    me.blocked_in = &operation;
    std::cv_status status = std::cv_status::no_timeout;
    if (!operation.complete() && num_cores_ > 0) {
      check_progress(world_rank, operation);
    }
    // A call that all have joined ends by itself.
    const auto until =
        operation.complete() ? deadline + std::chrono::hours(24) : deadline;
    if (!failed()) status = sleeper_->sleep(world_rank, lock, until);
    --me.num_blocked;
    me.blocked_in = nullptr;
    if (status == std::cv_status::timeout && !operation.complete() &&
        !failed()) {
      poison_and_throw(world_rank,
                       timeout_text(operation, world_rank, timeout));
    }
  }
}

void ThreadWorld::keep(std::shared_ptr<Operation> operation, Tensors buffers) {
  std::list<Kept> over;  // freed after the lock
  const Lock lock(mutex_);
  const auto first = std::partition(
      kept_.begin(), kept_.end(),
      [](const Kept& kept) { return !kept.operation->done.load(); });
  over.splice(over.end(), kept_, first, kept_.end());
  kept_.push_back({std::move(operation), std::move(buffers)});
}

// --- Running operations ------------------------------------------------------

void ThreadWorld::run_ready(Lock& lock) {
  while (!ready_.empty()) {
    std::shared_ptr<Operation> operation = std::move(ready_.front());
    ready_.pop_front();
    operation->plan();
    if (operation->gpu() >= 0) {
      if (run_on_gpu(*operation, lock)) finish(*operation);
      continue;
    }
    if (num_cores_ > 0 && operation->traffic_bytes() > kSmallBytes) {
      open(std::move(operation));
      continue;
    }
    if (operation->num_tasks() > 0) {
      lock.unlock();
      operation->run_tasks();
      lock.lock();
    }
    finish(*operation);
  }
}

// False when it failed; the world has then failed, too.
bool ThreadWorld::run_on_gpu(Operation& operation, Lock& lock) {
  if (operation.num_tasks() == 0) return true;
  std::exception_ptr failure;
  std::string reason;
  lock.unlock();
  try {
    DeviceRunner* runner = nullptr;
    {
      const Lock runners(mutex_);
      auto& made = runners_[operation.gpu()];
      if (made == nullptr) {
        made = std::make_unique<DeviceRunner>(operation.gpu());
      }
      runner = made.get();
    }
    const std::lock_guard<std::mutex> one_call(runner->mutex);
    runner->begin();
    operation.run_on_gpu(*runner);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    reason = error.what();
  }
  lock.lock();
  if (failure != nullptr) poison(operation.ranks.front(), reason, failure);
  return failure == nullptr;
}

void ThreadWorld::open(std::shared_ptr<Operation> operation) {
  operation->is_open = true;
  wake_members(*operation, num_cores_);
  open_.push_back(std::move(operation));
  // Members may be computing: the workers advance the call.
  start_workers();
  wake_worker_.notify_all();
}

void ThreadWorld::help(Operation& operation, Lock& lock) {
  ++operation.num_helpers;
  lock.unlock();
  const bool ended = operation.run_tasks();
  lock.lock();
  --operation.num_helpers;
  // All tasks are taken: no other thread needs to find this operation.
  std::shared_ptr<Operation> alive;
  const auto found = std::find_if(
      open_.begin(), open_.end(),
      [&](const auto& entry) { return entry.get() == &operation; });
  if (found != open_.end()) {
    alive = std::move(*found);
    open_.erase(found);
  }
  if (ended) finish(operation);
}

void ThreadWorld::finish(Operation& operation) {
  operation.done.store(true, std::memory_order_release);
  wake_members(operation, static_cast<int>(operation.ranks.size()));
  SharedGroup* group = operation.queue;
  if (group == nullptr) return;
  // The group's next call may start. (The Work of a member, or the caller,
  // keeps the operation alive.)
  group->queue.pop_front();
  ++group->first;
  if (!group->queue.empty() && group->queue.front()->complete()) {
    ready_.push_back(group->queue.front());
  }
}

void ThreadWorld::wake_members(const Operation& operation, int most) {
  for (int member : operation.ranks) {
    Rank& them = rank(member);
    if (them.num_blocked == 0) continue;
    if (most-- == 0) return;
    sleeper_->wake(member);
  }
}

void ThreadWorld::start_workers() {
  const std::size_t enough =
      std::min(ranks_.size(), static_cast<std::size_t>(num_cores_));
  while (workers_.size() < enough) workers_.emplace_back([this] { work(); });
}

void ThreadWorld::work() {
  Lock lock(mutex_);
  while (!stops_) {
    const auto found =
        std::find_if(open_.begin(), open_.end(), [&](const auto& operation) {
          return operation->has_tasks_to_take() &&
                 operation->num_helpers < num_cores_;
        });
    if (found == open_.end()) {
      wake_worker_.wait(lock);
      continue;
    }
    const std::shared_ptr<Operation> operation = *found;
    help(*operation, lock);
    run_ready(lock);
  }
}

}  // namespace shardbook::internal
