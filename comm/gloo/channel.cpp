#include "comm/gloo/channel.h"

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <deque>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {
namespace {

using std::chrono::milliseconds;

// A buffer of one call. Gloo waits once per posted message, for any of them;
// here each wait is for the oldest.
class CallBuffer : public ::gloo::transport::UnboundBuffer {
 public:
  CallBuffer(const Channel& channel, void* data, std::size_t bytes)
      : UnboundBuffer(data, bytes), channel_(channel) {}

  void send(int to, std::uint64_t slot, std::size_t offset,
            std::size_t bytes) override {
    sends_.push_back(channel_.send(to, slot, at(offset), size(offset, bytes)));
  }
  void recv(int from, std::uint64_t slot, std::size_t offset,
            std::size_t bytes) override {
    recvs_.push_back(
        channel_.recv(from, slot, at(offset), size(offset, bytes)));
  }
  void recv(std::vector<int>, std::uint64_t, std::size_t,
            std::size_t) override {
    SB_FAIL("no collective of Gloo receives from any rank");
  }

  // Messages have the channel's timeout, and a failure throws.
  bool waitSend(int*, milliseconds) override { return wait(sends_); }
  bool waitRecv(int*, milliseconds) override { return wait(recvs_); }
  void abortWaitSend() override {}
  void abortWaitRecv() override {}

 private:
  char* at(std::size_t offset) const {
    return static_cast<char*>(ptr) + offset;
  }
  std::size_t size(std::size_t offset, std::size_t bytes) const {
    return bytes == kUnspecifiedByteCount ? UnboundBuffer::size - offset
                                          : bytes;
  }
  bool wait(std::deque<Message>& messages) {
    messages.front().wait();
    messages.pop_front();
    return true;
  }

  const Channel& channel_;
  std::deque<Message> sends_, recvs_;
};

class CallTransport : public ::gloo::transport::Context {
 public:
  explicit CallTransport(const Channel& channel)
      : Context(channel.rank, channel.size()), channel_(channel) {}

  std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(
      void* data, std::size_t bytes) override {
    return std::make_unique<CallBuffer>(channel_, data, bytes);
  }
  // Collectives ask whether there is a connection.
  std::unique_ptr<::gloo::transport::Pair>& getPair(int peer) override {
    return channel_.world->mesh().getPair(
        channel_.ranks[static_cast<std::size_t>(peer)]);
  }
  std::unique_ptr<::gloo::transport::Pair>& createPair(int) override {
    SB_FAIL("a call uses the connections of its world");
  }

 private:
  const Channel& channel_;
};

class CallContext : public ::gloo::Context {
 public:
  explicit CallContext(const Channel& channel)
      : Context(channel.rank, channel.size()) {
    transportContext_ = std::make_shared<CallTransport>(channel);
  }
};

}  // namespace

Message Channel::send(int to, std::uint64_t step, const void* data,
                      std::size_t bytes) const {
  return Message(*world, info, Message::Way::kSend,
                 ranks[static_cast<std::size_t>(to)], slot + step, data, bytes);
}

Message Channel::recv(int from, std::uint64_t step, void* data,
                      std::size_t bytes) const {
  return Message(*world, info, Message::Way::kRecv,
                 ranks[static_cast<std::size_t>(from)], slot + step, data,
                 bytes);
}

std::shared_ptr<::gloo::Context> Channel::context() const {
  return std::make_shared<CallContext>(*this);
}

}  // namespace shardbook::internal
