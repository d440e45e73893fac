#include "comm/threads/thread_group.h"

#include <algorithm>
#include <thread>

#include "comm/internal/arguments.h"
#include "comm/internal/backends.h"
#include "comm/internal/rank_device.h"
#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/internal/transfers.h"

namespace shardbook::internal {
namespace {

// Notes where a rank's buffers lie. On a GPU, waits for all work on the current
// stream: the call may run as soon as the rank has arrived.
void place(Slot& slot, const Tensors& buffers) {
  slot.has_buffers = !buffers.empty();
  for (const Tensor& buffer : buffers) {
    if (!buffer.device().is_cuda()) continue;
    CudaDevice& device = cuda_device(buffer.device());
    slot.gpu = device.index();
    device.synchronize(RankContext::current().stream);
  }
}

// A call in flight, as its rank sees it.
class ThreadWork : public Work::State {
 public:
  ThreadWork(std::shared_ptr<ThreadWorld> world,
             std::shared_ptr<Operation> operation, int world_rank,
             std::chrono::milliseconds timeout, Tensors buffers)
      : world_(std::move(world)),
        operation_(std::move(operation)),
        world_rank_(world_rank),
        timeout_(timeout),
        buffers_(std::move(buffers)) {}

  ~ThreadWork() override {
    // Dropped before its end: peers still read and write the buffers.
    if (!operation_->done) world_->keep(operation_, std::move(buffers_));
  }

  void wait() override { world_->wait(*operation_, world_rank_, timeout_); }

  // True after a failure, too: a caller that polls must still see the error.
  bool done() override {
    if (!operation_->done.load(std::memory_order_acquire)) {
      world_->yield(world_rank_);
    }
    return operation_->done.load(std::memory_order_acquire) || world_->failed();
  }

 private:
  std::shared_ptr<ThreadWorld> world_;
  std::shared_ptr<Operation> operation_;
  int world_rank_;
  std::chrono::milliseconds timeout_;
  Tensors buffers_;
};

}  // namespace

ThreadGroup::ThreadGroup(std::shared_ptr<ThreadWorld> world,
                         SharedGroup& shared, int rank,
                         std::chrono::milliseconds timeout)
    : ProcessGroup(rank, shared.ranks, shared.name),
      world_(std::move(world)),
      shared_(shared),
      timeout_(timeout) {}

Work ThreadGroup::work(std::shared_ptr<Operation> operation, Tensors buffers) {
  if (operation == nullptr || operation->done.load(std::memory_order_acquire)) {
    return Work();
  }
  return Work(std::make_shared<ThreadWork>(world_, std::move(operation),
                                           my_world_rank(), timeout_,
                                           std::move(buffers)));
}

Work ThreadGroup::do_collective(const CommCall& call,
                                const CommBuffers& buffers) {
  Slot slot;
  slot.call = call;
  slot.send_counts = buffers.send_counts;
  slot.recv_counts = buffers.recv_counts;
  Tensors tensors;
  if (buffers.input.defined()) {
    slot.input = buffers.input.raw();
    tensors.push_back(buffers.input);
  }
  if (buffers.output.defined()) {
    slot.output = buffers.output.raw();
    tensors.push_back(buffers.output);
  }
  place(slot, tensors);
  return work(world_->arrive(shared_, rank(), next_call_++, std::move(slot)),
              std::move(tensors));
}

Work ThreadGroup::message(const CommCall& call, const Tensor& input,
                          const Tensor& output) {
  Slot slot;
  slot.call = call;
  slot.input = input.defined() ? input.raw() : nullptr;
  slot.output = output.defined() ? output.raw() : nullptr;
  const Tensor& buffer = input.defined() ? input : output;
  place(slot, {buffer});
  if (slot.gpu >= 0 && input.defined() && input.bytes() > 0 &&
      input.bytes() <= kEagerBytes) {
    slot.eager.resize(static_cast<std::size_t>(input.bytes()));
    read_to_host(slot.eager.data(), input);
    slot.input = slot.eager.data();
  }
  return work(world_->exchange_message(shared_, rank(), std::move(slot)),
              {buffer});
}

Work ThreadGroup::do_send(const Tensor& tensor, const CommCall& call) {
  return message(call, tensor, Tensor());
}

Work ThreadGroup::do_recv(const Tensor& tensor, const CommCall& call) {
  return message(call, Tensor(), tensor);
}

std::vector<std::string> ThreadGroup::texts_of_all(const std::string& text,
                                                   bool for_all) {
  if (size() == 1) return {text};
  Slot mine;
  mine.is_exchange = true;
  mine.text = text;
  const std::shared_ptr<Operation> operation =
      world_->arrive(shared_, rank(), next_call_++, std::move(mine));
  world_->wait(*operation, my_world_rank(), timeout_);
  std::vector<std::string> texts;
  if (!for_all && rank() != 0) return texts;
  for (const Slot& slot : operation->slots) texts.push_back(slot.text);
  return texts;
}

std::vector<std::string> ThreadGroup::exchange(const std::string& text) {
  return texts_of_all(text, /*for_all=*/true);
}

// With thousands of ranks, a copy of all texts for each would not fit.
std::vector<std::string> ThreadGroup::collect(const std::string& text) {
  return texts_of_all(text, /*for_all=*/false);
}

std::shared_ptr<ProcessGroup> ThreadGroup::do_subgroup(
    const std::vector<int>& members, const std::string& name) {
  SharedGroup& shared =
      world_->find_group(shared_, members, num_made_[members]++, name);
  int position = 0;
  while (members[static_cast<std::size_t>(position)] != rank()) ++position;
  return std::make_shared<ThreadGroup>(world_, shared, position, timeout_);
}

void ThreadGroup::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
}

void ThreadGroup::abort(const std::string& reason) {
  const std::string text =
      "rank " + std::to_string(my_world_rank()) + " failed: " + reason;
  world_->fail(my_world_rank(), reason, std::make_exception_ptr(Error(text)));
}

// --- Ranks

namespace {

void check_thread_ranks(int, const LaunchOptions& options) {
  if (options.device == "cuda") check_gpus();
}

void run_thread_ranks(int world_size,
                      const std::function<void(ProcessGroup&)>& body,
                      const LaunchOptions& options) {
  const int cores = available_cores();
  const auto world = std::make_shared<ThreadWorld>(world_size, cores, nullptr,
                                                   options.rendezvous_sends);
  std::atomic<bool> any_threw{false};

  const auto run_rank = [&](int r) {
    world->rank_begins(r);
    try {
      RankContext context(
          rank_device(r, r, world_size, options.device == "cuda", options), r,
          std::max(1, cores / world_size));
      context.deterministic = options.deterministic;
      const RankContext::Scope scope(context);
      ThreadGroup group(world, world->root_group(), r, options.timeout);
      body(group);
    } catch (...) {
      any_threw = true;
      world->fail(r);
    }
    world->rank_ended(r);
  };

  std::vector<std::thread> ranks;
  try {
    for (int r = 0; r < world_size; ++r) ranks.emplace_back(run_rank, r);
  } catch (...) {
    // The system gives no more threads: those that run must not wait for them.
    world->fail(static_cast<int>(ranks.size()), "its thread did not start",
                std::current_exception());
    any_threw = true;
  }
  for (std::thread& thread : ranks) thread.join();
  if (any_threw) std::rethrow_exception(world->first_cause());
}

}  // namespace

const Backend kThreads{"threads", check_thread_ranks, run_thread_ranks};

}  // namespace shardbook::internal
