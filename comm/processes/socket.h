#pragma once

// TCP sockets and the frames of the control line between the ranks and their
// coordinator (comm/processes/coordinator.h).
//
//   frame   u32 bytes that follow | u8 kind | fields
//   field   u32 bytes             | the bytes
//
// Numbers are little endian. A frame is at most kMaxFrameBytes long; a peer
// that sends a longer or a broken one is disconnected.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardbook::internal {

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { close(); }

  int value() const { return value_; }
  bool valid() const { return value_ >= 0; }
  int release();
  void close();

 private:
  int value_ = -1;
};

struct HostPort {
  std::string host;
  int port = 0;
  bool operator==(const HostPort&) const = default;
};

/// "host:port", "[v6]:port". Throws Error that shows the text.
HostPort parse_host_port(const std::string& text);
/// The same text again.
std::string host_port_text(const HostPort& address);

/// The host of a socket that listens on all addresses of this host.
constexpr const char* kAllAddresses = "";

/// A socket that listens on this address only. Port 0: a free one. Waits for a
/// port that is taken, as long as `patience`; then it throws Error.
Descriptor listen_on(const HostPort& address,
                     std::chrono::milliseconds patience = {});
/// The numeric address and the port of this end.
HostPort own_address(const Descriptor& socket);
/// Whether a host, as a number, is this host for itself alone: 127.0.0.1, ::1.
bool is_loopback(const std::string& host);
/// Whether a name means loopback on this host, or nothing.
bool is_name_of_loopback(const std::string& host);
/// The first numeric address of an interface such as "eth0".
std::string interface_host(const std::string& name);
/// The numeric addresses of this host, the loopback's first.
std::vector<std::string> host_addresses();
/// Connects; the descriptor is invalid, and `cause` says why, when there is no
/// answer or the name is not known.
Descriptor try_connect(const HostPort& address,
                       std::chrono::milliseconds timeout, std::string* cause);

enum class FrameKind : std::uint8_t {
  kHello,      // generation, world size, rank, job, serial
  kWelcome,    //
  kCall,       // key, members, signature, text
  kExchange,   // key, members, name, text
  kExchanged,  // key, texts by position among the members
  kFail,       // reason
  kFailed,     // message
  kLeave,      //
  kAllLeft,    //
  kPing,       //
  kPong,       //
  kOverdue,    // id, text, peers, key, timeout in ms: a wait that is too long
  kAsk,        // number of the question: what does this rank wait for?
  kWaits,      // number, "1" if the rank itself waits, then for each wait
               // id, text, peers, key
  kMail,       // to the coordinator: rank, key, text; from it: key, text
  kStranger    // job: its ranks meet here, and yours do not
};

struct Frame {
  FrameKind kind = FrameKind::kHello;
  std::vector<std::string> fields;
};

/// The key of a wait for the ranks that have not left the world.
constexpr const char* kLeaveKey = "leave";
/// The key of the coordinator's mail to a rank that came by loopback: the
/// address at which ranks of other hosts reach this host.
constexpr const char* kNetworkKey = "network";

constexpr std::size_t kMaxFrameBytes = std::size_t{64} << 20;
/// The same for a hello, and for the answer to it.
constexpr std::size_t kMaxHelloBytes = 4096;

std::string encode_frame(const Frame& frame);

/// Takes the first whole frame off `buffer`; empty while it is incomplete.
/// Throws Error on bytes that cannot be a frame of up to `max_bytes`.
std::optional<Frame> take_frame(std::string& buffer, std::size_t max_bytes);

/// Throws Error unless the frame has `count` fields.
void check_fields(const Frame& frame, std::size_t count);
/// A number from 0 to `limit`. Throws Error on anything else.
std::int64_t parse_number(const std::string& text, std::int64_t limit);
/// "0,2,5" and back. Throws Error on anything else.
std::string join_ranks(const std::vector<int>& ranks);
std::vector<int> split_ranks(const std::string& text, int world_size);

}  // namespace shardbook::internal
