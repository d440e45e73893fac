#include "comm/gloo/gloo_world.h"

#include <csignal>

#include <fmt/format.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <exception>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "comm/gloo/calls.h"
#include "comm/processes/rendezvous.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

using std::chrono::milliseconds;

// A broken connection waits this long for the coordinator to give the reason.
constexpr milliseconds kReasonPatience{2000};

// Connects to all ranks, whose addresses the coordinator passes on. Gloo cannot
// be interrupted, so a separate thread connects; when the world fails
// meanwhile, that thread is left behind, and Gloo's own timeout ends it.
std::shared_ptr<::gloo::transport::Context> connect(int rank, int size,
                                                    const std::string& host,
                                                    ControlLine& line,
                                                    milliseconds timeout) {
  ::gloo::transport::tcp::attr attributes;
  attributes.hostname = host;
  const std::shared_ptr<::gloo::transport::Context> mesh =
      ::gloo::transport::tcp::CreateDevice(attributes)
          ->createContext(rank, size);
  mesh->setTimeout(timeout);
  const auto key = [](int from) { return "address/" + std::to_string(from); };
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto bytes = mesh->createPair(peer)->address().bytes();
    line.mail(peer, key(rank), {bytes.begin(), bytes.end()});
  }
  std::map<int, std::vector<char>> addresses;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const std::string text =
        line.wait_for_mail(key(peer), joining_text(size), timeout);
    addresses[peer] = {text.begin(), text.end()};
  }
  std::packaged_task<void()> connecting([mesh, addresses] {
    for (const auto& [peer, address] : addresses) {
      mesh->getPair(peer)->connect(address);
    }
  });
  std::future<void> connected = connecting.get_future();
  std::thread(std::move(connecting)).detach();
  while (connected.wait_for(milliseconds(20)) != std::future_status::ready) {
    if (!line.failure().empty()) throw RunError(line.failure());
  }
  connected.get();
  return mesh;
}

// The wait in progress, or the next one, returns false.
void abort_wait(::gloo::transport::UnboundBuffer& buffer) {
  buffer.abortWaitRecv();
  buffer.abortWaitSend();
}

// Writing to a dead rank must be an error, not end this process.
void ignore_broken_pipes() {
  struct sigaction current {};
  sigaction(SIGPIPE, nullptr, &current);
  if (current.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

}  // namespace

GlooWorld::GlooWorld(const RankEnvironment& environment,
                     std::uint64_t generation, const LaunchOptions& options)
    : rank_(environment.rank),
      size_(environment.world_size),
      timeout_(options.timeout),
      rendezvous_(make_rendezvous(environment, generation, options)) {
  ignore_broken_pipes();
  line_ = join_world(rendezvous_, environment, generation, options);
  const std::string joining = joining_text(size_);
  try {
    const ControlLine::Wait wait(*line_, joining, "", timeout_);
    // The coordinator enforces timeouts; Gloo's own is the last resort.
    const std::string& network = options.network_interface;
    mesh_ = connect(rank_, size_,
                    network.empty() ? line_->host() : interface_host(network),
                    *line_, timeout_ + kReasonPatience);
  } catch (const std::exception& error) {
    throw_failure({joining, timeout_}, -1, error.what());
  }
  // No rank may begin, and perhaps end, while others are still connecting.
  wait_for_all(*line_, "joined", size_, timeout_);
  line_->set_failure_callback([this] { abort_waits(); });
}

GlooWorld::~GlooWorld() {
  for (const auto& queue : queues_) queue->forget_messages();
  queues_.clear();
  // The reader's thread must not call a world that is being destroyed.
  line_->set_failure_callback(nullptr);
  line_.reset();
}

void GlooWorld::check(const CallInfo& info) const {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) return;
  }
  throw failure_in(line_->failure(), info);
}

RunError GlooWorld::failure_in(const std::string& failure,
                               const CallInfo& info) const {
  return RunError(
      fmt::format("{} (while rank {} was in {})", failure, rank_, info.text));
}

void GlooWorld::fail(const std::string& reason) {
  if (line_->failure().empty()) line_->fail(reason);
}

void GlooWorld::leave() {
  for (const auto& queue : queues_) queue->drain();
  line_->leave(timeout_);
}

void GlooWorld::add_queue(std::shared_ptr<CallQueue> queue) {
  queues_.push_back(std::move(queue));
}

void GlooWorld::release_queue(const std::shared_ptr<CallQueue>& queue) {
  if (!queue->idle()) return;
  queues_.erase(std::remove(queues_.begin(), queues_.end(), queue),
                queues_.end());
}

void GlooWorld::abort_waits() {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  for (::gloo::transport::UnboundBuffer* buffer : waiting_) abort_wait(*buffer);
}

void GlooWorld::throw_failure(const CallInfo& info, int peer,
                              const std::string& cause) {
  std::string failure = line_->wait_for_failure(kReasonPatience);
  if (failure.empty()) {
    const std::string lost =
        peer < 0
            ? cause
            : fmt::format("lost the connection to rank {} ({})", peer, cause);
    line_->fail(lost);
    failure = line_->failure();
    if (failure.empty()) failure = lost;
  }
  throw failure_in(failure, info);
}

Message::Message(GlooWorld& world, CallInfo info, Way way, int peer,
                 std::uint64_t slot, const void* data, std::size_t bytes)
    : world_(&world), info_(std::move(info)), way_(way), peer_(peer) {
  world.check(info_);
  buffer_ = world.mesh_->createUnboundBuffer(const_cast<void*>(data), bytes);
  try {
    if (way == Way::kSend) {
      buffer_->send(peer, slot, 0, bytes);
    } else {
      buffer_->recv(peer, slot, 0, bytes);
    }
  } catch (const std::exception& error) {
    world.throw_failure(info_, peer, error.what());
  }
}

Message::Message(Message&&) noexcept = default;
Message& Message::operator=(Message&&) noexcept = default;
Message::~Message() = default;

void Message::wait() {
  if (buffer_ == nullptr) return;
  {
    const std::lock_guard lock(world_->mutex_);
    world_->waiting_.insert(buffer_.get());
    if (world_->failed_) abort_wait(*buffer_);
  }
  bool arrived = false;
  std::string cause;
  try {
    const ControlLine::Wait wait(world_->line(), info_.text, peer_,
                                 info_.timeout);
    // The coordinator enforces timeouts; Gloo's own is the last resort.
    const milliseconds limit = info_.timeout + milliseconds(10000);
    arrived = way_ == Way::kSend ? buffer_->waitSend(nullptr, limit)
                                 : buffer_->waitRecv(nullptr, limit);
  } catch (const std::exception& error) {
    cause = error.what();
  }
  {
    const std::lock_guard lock(world_->mutex_);
    world_->waiting_.erase(buffer_.get());
  }
  buffer_.reset();
  if (!arrived) world_->throw_failure(info_, peer_, cause);
}

}  // namespace shardbook::internal
