#pragma once

// Messages over NCCL, which has neither tags nor messages that arrive before
// their receive.
//
// Messages from one rank of a group to another share a *way*: a communicator of
// the two, and a stream on each side, so no way and no collective ever waits
// for another. On a way, messages move in the order of the sender. The sender
// mails the receiver the tag of each, and the receiver answers the next message
// with the oldest receive of that tag. If only receives of other tags are
// posted, the message goes to a block of memory until one matches.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "comm/nccl/nccl_world.h"

namespace shardbook::internal {

/// Guarded by the world's mutex.
class NcclMessages {
 public:
  explicit NcclMessages(NcclWorld& world) : world_(world) {}

  /// The stream that carries a way's messages.
  int stream_of(const std::string& way, bool sends) {
    return find(way, sends).stream;
  }
  /// The parts of a message that both ends must agree on.
  struct Header {
    int tag = 0;
    DType dtype = DType::kF32;
    std::size_t count = 0;
    std::size_t bytes() const { return count * dtype_bytes(dtype); }
    bool operator==(const Header& other) const {
      return tag == other.tag && dtype == other.dtype && count == other.count;
    }
  };
  void send(const std::string& way, int to, std::shared_ptr<NcclCall> call,
            const void* data, const Header& header);
  void recv(const std::string& way, std::shared_ptr<NcclCall> call, void* data,
            const Header& header);
  /// Advances every way as far as possible without waiting.
  void advance();
  /// Some message has not been issued yet.
  bool has_waiting() const;
  void forget() { ways_.clear(); }

 private:
  struct Message {
    std::shared_ptr<NcclCall> call;  // null: came before its receive
    void* data = nullptr;
    Header header;
    std::shared_ptr<void> block = nullptr;  // holds one that came early
  };
  struct Way {
    std::string name;
    bool sends = false;
    std::shared_ptr<NcclCommunicator> communicator;
    bool is_connected = false;
    int stream = -1;
    std::int64_t num_mailed = 0;  // by the sender
    std::int64_t next = 0;        // number of the next header
    std::optional<Header> header;
    std::string id;  // the communicator's, from the first header
    std::deque<Message> posted;
    std::optional<Message> in_progress;
    std::map<int, std::deque<Message>> early;  // by tag
  };

  Way& find(const std::string& name, bool sends);
  void advance(Way& way);
  bool connect(Way& way);
  bool read_header(Way& way);
  std::optional<Message> next(Way& way);
  void take_early(Way& way);
  void start(Way& way, Message message);

  NcclWorld& world_;
  std::map<std::string, Way> ways_;
};

}  // namespace shardbook::internal
