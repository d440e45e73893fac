#include "comm/nccl/nccl_world.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "comm/internal/arguments.h"
#include "comm/nccl/nccl_messages.h"
#include "comm/processes/rendezvous.h"
#include "comm/processes/socket.h"
#include "core/check.h"
#include "core/context.h"
#include "core/stream.h"

namespace shardbook::internal {
namespace {

using std::chrono::milliseconds;

// Polling interval of a rank that waits for a message to be issued.
constexpr std::chrono::microseconds kWaiterTick{50};

// Streams with smaller numbers belong to the rank's own work (core/stream.h).
constexpr int kFirstStream = kCopyStream + 1;

NcclMessages::Header header_of(const Tensor& tensor, int tag) {
  return {tag, tensor.dtype(), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

// Device memory for messages that leave their buffers at once or come early.
// It is kept until the world ends: giving it back would make the host wait for
// all work of the device.
struct NcclWorld::Blocks {
  explicit Blocks(CudaDevice& gpu) : gpu(gpu) {}
  ~Blocks() {
    try {
      gpu.runtime().use(gpu.index());
      for (const auto& [size, data] : all) gpu.runtime().free(data);
    } catch (const Error&) {
      // The device failed; the calls that waited for it have thrown.
    }
  }
  CudaDevice& gpu;
  std::mutex mutex;
  std::multimap<std::size_t, void*> all, free;
};

// --- A call ------------------------------------------------------------------

NcclCall::NcclCall(const std::shared_ptr<NcclWorld>& world, std::string text,
                   const std::string& key, milliseconds timeout,
                   Tensors buffers)
    : text(std::move(text)),
      world_(world),
      buffers_(std::move(buffers)),
      wait_(std::make_unique<ControlLine::Wait>(world->line(), this->text, key,
                                                timeout)) {}

void NcclCall::wait() {
  if (const auto world = world_.lock()) world->wait(*this);
}

bool NcclCall::done() {
  const auto world = world_.lock();
  return world == nullptr || world->done(*this);
}

// --- A world -----------------------------------------------------------------

NcclWorld::NcclWorld(const RankEnvironment& environment,
                     std::uint64_t generation, const LaunchOptions& options,
                     const Device& device)
    : rank_(environment.rank),
      size_(environment.world_size),
      device_(device),
      gpu_(cuda_device(device_)),
      runtime_(gpu_.runtime()),
      library_(nccl_library()),
      timeout_(options.timeout),
      rendezvous_(make_rendezvous(environment, generation, options)),
      line_(join_world(rendezvous_, environment, generation, options)),
      num_streams_(kFirstStream),
      blocks_(std::make_shared<Blocks>(gpu_)),
      messages_(std::make_unique<NcclMessages>(*this)) {
  line_->set_failure_callback([this] {
    const Lock lock(mutex_);
    has_failed_ = true;
    changed_.notify_all();
  });
  line_->set_mail_callback([this] {
    const Lock lock(mutex_);
    changed_.notify_all();
  });
  watchdog_ = std::thread([this] { watch(); });
}

NcclWorld::~NcclWorld() {
  {
    const Lock lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  watchdog_.join();
  line_->set_failure_callback(nullptr);
  line_->set_mail_callback(nullptr);
  const Lock lock(mutex_);
  if (has_failed_ && !is_aborted_) abort_all();
  for (const auto& call : calls_) call->wait_.reset();
  calls_.clear();
  ended_.clear();
  messages_->forget();
  try {
    runtime_.use(gpu_.index());
    for (const Communicator& each : communicators_) each->finalize();
    communicators_.clear();
    for (void* event : events_) runtime_.destroy_event(event);
  } catch (const Error&) {
    // The device failed; the calls that waited for it have thrown.
  }
}

void NcclWorld::leave() {
  std::set<int> streams;
  {
    Lock lock(mutex_);
    changed_.wait(lock, [&] {
      return has_failed_ ||
             std::all_of(calls_.begin(), calls_.end(), [](const auto& call) {
               return call->finished_ != nullptr;
             });
    });
    for (const auto& call : calls_) streams.insert(call->stream_);
  }
  // A failure ends the calls that wait on the device, and so these waits.
  for (const int stream : streams) gpu_.synchronize(stream);
  check("the final barrier");
  {
    const Lock lock(mutex_);
    end_finished();
    ended_.clear();
  }
  line_->leave(timeout_);
}

// --- Communicators -----------------------------------------------------------

NcclWorld::Communicator NcclWorld::join(const std::string& key,
                                        const std::vector<int>& ranks, int rank,
                                        const std::string& name,
                                        milliseconds timeout) {
  const std::string text =
      "the set-up of the NCCL communicator of '" + name + "'";
  check(text);
  const std::string mine = rank == 0 ? library_.make_id() : "";
  const std::string id =
      line_->exchange(key, join_ranks(ranks), text, mine, timeout).front();
  return make_communicator(text, timeout, [&] {
    return library_.join(id, static_cast<int>(ranks.size()), rank);
  });
}

NcclWorld::Communicator NcclWorld::split(const Communicator& parent, int stream,
                                         int color, int key,
                                         const std::string& name,
                                         milliseconds timeout) {
  const std::string text = "the split for the communicator of '" + name + "'";
  // NCCL allows nothing else in flight on the parent.
  gpu_.synchronize(stream);
  check(text);
  return make_communicator(text, timeout,
                           [&] { return parent->split(color, key); });
}

NcclWorld::Communicator NcclWorld::make_communicator(
    const std::string& text, milliseconds timeout,
    const std::function<Communicator()>& make) {
  const ControlLine::Wait wait(*line_, text, "", timeout);
  Communicator result;
  {
    const Lock lock(mutex_);
    runtime_.use(gpu_.index());
    result = make();
    communicators_.push_back(result);
  }
  settle(result, text);
  return result;
}

// Waits until NCCL has accepted all calls.
void NcclWorld::settle(const Communicator& communicator,
                       const std::string& text) {
  // NCCL accepts most calls in less time than a sleep takes.
  const auto sleepless =
      std::chrono::steady_clock::now() + std::chrono::microseconds(300);
  std::chrono::microseconds pause{20};
  for (;;) {
    {
      const Lock lock(mutex_);
      if (has_failed_) break;
      if (communicator->is_ready()) return;
    }
    if (std::chrono::steady_clock::now() < sleepless) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
  throw_failure(text);
}

int NcclWorld::take_stream() {
  const Lock lock(mutex_);
  return next_stream();
}

int NcclWorld::next_stream() {
  if (!free_streams_.empty()) {
    const int stream = free_streams_.back();
    free_streams_.pop_back();
    return stream;
  }
  SB_CHECK(num_streams_ < kMaxStreams, "backend nccl: rank ", rank_, " has ",
           kMaxStreams - kFirstStream,
           " groups and pairs that exchange messages; each needs a stream, and "
           "there are no more");
  return num_streams_++;
}

void NcclWorld::give_stream(int stream) {
  const Lock lock(mutex_);
  free_streams_.push_back(stream);
}

void* NcclWorld::current_stream() {
  return gpu_.stream(RankContext::current().stream);
}

// --- Calls -------------------------------------------------------------------

Work NcclWorld::issue(const Communicator& communicator, int stream,
                      std::shared_ptr<NcclCall> call, const Run& run) {
  Calls over;  // released after the lock
  {
    const Lock lock(mutex_);
    if (has_failed_) throw_failure(call->text);
    end_finished();
    over.swap(ended_);
    begin(call);
    put_in_line(*call, stream);
    if (run) run(*communicator, gpu_.stream(stream));
  }
  if (run) settle(communicator, call->text);
  const Lock lock(mutex_);
  mark_issued(*call, stream);
  return Work(std::move(call));
}

Work NcclWorld::send(const std::string& way, int to,
                     std::shared_ptr<NcclCall> call, const Tensor& tensor,
                     int tag) {
  const auto bytes = static_cast<std::size_t>(tensor.bytes());
  const bool is_eager = tensor.bytes() <= kEagerBytes;
  Calls over;
  const Lock lock(mutex_);
  if (has_failed_) throw_failure(call->text);
  over.swap(ended_);
  const void* data = nullptr;
  if (is_eager && bytes > 0) {
    call->block_ = take_block(bytes);
    runtime_.copy(call->block_.get(), tensor.raw(), bytes, current_stream());
    data = call->block_.get();
  } else if (!is_eager) {
    call->buffers_ = {tensor};
    const StreamScope scope(messages_->stream_of(way, true));
    data = tensor.raw();
  }
  begin(call);
  messages_->send(way, to, call, data, header_of(tensor, tag));
  messages_->advance();
  changed_.notify_all();
  return is_eager ? Work() : Work(std::move(call));
}

Work NcclWorld::recv(const std::string& way, std::shared_ptr<NcclCall> call,
                     const Tensor& tensor, int tag) {
  Calls over;
  const Lock lock(mutex_);
  if (has_failed_) throw_failure(call->text);
  over.swap(ended_);
  call->buffers_ = {tensor};
  void* data = nullptr;
  {
    const StreamScope scope(messages_->stream_of(way, false));
    data = tensor.raw();
  }
  begin(call);
  messages_->recv(way, call, data, header_of(tensor, tag));
  messages_->advance();
  changed_.notify_all();
  return Work(std::move(call));
}

void NcclWorld::wait(NcclCall& call) {
  Calls over;
  Tensors buffers;
  {
    Lock lock(mutex_);
    // The waiting rank also advances messages that are not issued yet.
    while (!has_failed_ && !call.has_ended_ && call.finished_ == nullptr) {
      messages_->advance();
      if (call.finished_ != nullptr) break;
      changed_.wait_for(lock, kWaiterTick);
    }
    if (!has_failed_) {
      if (!call.has_ended_) {
        runtime_.hold_stream(current_stream(), call.finished_);
      }
      over.swap(ended_);
      // The caller's later work runs after the call.
      buffers.swap(call.buffers_);
      return;
    }
  }
  throw_failure(call.text);
}

// True after a failure, too: a caller that polls must still see the error.
bool NcclWorld::done(NcclCall& call) {
  const Lock lock(mutex_);
  if (has_failed_ || call.has_ended_) return true;
  if (call.finished_ == nullptr) return false;
  runtime_.use(gpu_.index());
  return runtime_.event_has_passed(call.finished_);
}

void NcclWorld::begin(const std::shared_ptr<NcclCall>& call) {
  call->ready_ = take_event();
  runtime_.record_event(call->ready_, current_stream());
  calls_.push_back(call);
}

// A wait is for the point that was recorded when the wait was issued, so the
// event may be recorded again at once.
void NcclWorld::put_in_line(NcclCall& call, int stream) {
  runtime_.hold_stream(gpu_.stream(stream), call.ready_);
  free_events_.push_back(std::exchange(call.ready_, nullptr));
}

void NcclWorld::mark_issued(NcclCall& call, int stream) {
  call.stream_ = stream;
  void* const event = take_event();
  runtime_.record_event(event, gpu_.stream(stream));
  call.finished_ = event;
  changed_.notify_all();
}

void* NcclWorld::take_event() {
  if (free_events_.empty()) {
    runtime_.use(gpu_.index());
    events_.push_back(runtime_.make_event());
    free_events_.push_back(events_.back());
  }
  void* event = free_events_.back();
  free_events_.pop_back();
  return event;
}

std::shared_ptr<void> NcclWorld::take_block(std::size_t bytes) {
  std::size_t size = kEagerBytes;
  while (size < bytes) size *= 2;
  void* data = nullptr;
  const std::lock_guard blocks_lock(blocks_->mutex);
  const auto found = blocks_->free.find(size);
  if (found != blocks_->free.end()) {
    data = found->second;
    blocks_->free.erase(found);
  } else {
    runtime_.use(gpu_.index());
    data = runtime_.allocate(size);
    SB_CHECK(data != nullptr, "out of memory on ", device_.name(),
             ": asked for ", size, " bytes for a message");
    blocks_->all.emplace(size, data);
  }
  return {data, [blocks = blocks_, size](void* block) {
            const std::lock_guard lock(blocks->mutex);
            blocks->free.emplace(size, block);
          }};
}

void NcclWorld::end(NcclCall& call) {
  call.has_ended_ = true;
  call.wait_.reset();
  call.block_.reset();
  free_events_.push_back(std::exchange(call.finished_, nullptr));
}

// Calls of one stream finish in order, so only the first unfinished call of
// each stream is checked.
void NcclWorld::end_finished() {
  std::set<int> busy;
  const auto has_finished = [&](const std::shared_ptr<NcclCall>& call) {
    if (call->finished_ == nullptr || busy.count(call->stream_) > 0) {
      return false;
    }
    if (runtime_.event_has_passed(call->finished_)) return true;
    busy.insert(call->stream_);
    return false;
  };
  Calls rest;
  for (auto& call : calls_) {
    if (has_finished(call)) {
      end(*call);
      ended_.push_back(std::move(call));
    } else {
      rest.push_back(std::move(call));
    }
  }
  calls_ = std::move(rest);
}

}  // namespace shardbook::internal
