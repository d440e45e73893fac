#include "comm/processes/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>

#include "core/check.h"

namespace shardbook::internal {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const HostPort& address, bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int status =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(),
                  &hints, &list);
  SB_CHECK(status == 0, "rendezvous: cannot resolve host \"", address.host,
           "\": ", gai_strerror(status),
           "; give one that every rank knows by --rendezvous or MASTER_ADDR");
  return {list, &freeaddrinfo};
}

void set_no_delay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string numeric_host(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

// `get`: getsockname or getpeername.
HostPort address_of(const Descriptor& socket,
                    int (*get)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  get(socket.value(), reinterpret_cast<sockaddr*>(&address), &length);
  // The port of an IPv6 address lies in the same place.
  return {numeric_host(reinterpret_cast<sockaddr*>(&address), length),
          ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port)};
}

static_assert(std::endian::native == std::endian::little);

void append_u32(std::string& bytes, std::uint32_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::uint32_t read_u32(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    value_ = other.release();
  }
  return *this;
}

int Descriptor::release() {
  const int value = value_;
  value_ = -1;
  return value;
}

void Descriptor::close() {
  if (value_ >= 0) ::close(value_);
  value_ = -1;
}

HostPort parse_host_port(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  const char* form = "; write HOST:PORT with a port from 0 to 65535";
  SB_CHECK(colon != std::string::npos && colon > 0, "rendezvous address \"",
           text, "\" has no host or no port", form);
  HostPort result;
  result.host = text.substr(0, colon);
  if (result.host.size() > 2 && result.host.front() == '[' &&
      result.host.back() == ']') {
    result.host = result.host.substr(1, result.host.size() - 2);
  }
  const std::string port = text.substr(colon + 1);
  SB_CHECK(!port.empty() && port.size() <= 5 &&
               port.find_first_not_of("0123456789") == std::string::npos &&
               std::stoi(port) <= 65535,
           "rendezvous address \"", text, "\": \"", port, "\" is no port",
           form);
  result.port = std::stoi(port);
  return result;
}

Descriptor listen_on(const HostPort& address) {
  int cause = 0;
  const AddressList list = resolve(address, /*passive=*/true);
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
    Descriptor socket(::socket(entry->ai_family,
                               entry->ai_socktype | SOCK_CLOEXEC,
                               entry->ai_protocol));
    const int on = 1;
    if (socket.valid()) {
      setsockopt(socket.value(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    if (socket.valid() &&
        bind(socket.value(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        listen(socket.value(), SOMAXCONN) == 0) {
      return socket;
    }
    cause = errno;
  }
  SB_FAIL("rendezvous: cannot listen on ", address.host, ":", address.port,
          ": ", std::strerror(cause),
          "; rank 0 must run on the host that the address names, and the port "
          "must be free");
}

HostPort own_address(const Descriptor& socket) {
  return address_of(socket, getsockname);
}

std::string interface_host(const std::string& name) {
  ifaddrs* raw = nullptr;
  SB_CHECK(getifaddrs(&raw) == 0, "--interface ", name,
           ": cannot list the interfaces of this host");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(raw,
                                                              &freeifaddrs);
  std::set<std::string> known;
  for (const ifaddrs* entry = raw; entry; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (name == entry->ifa_name) {
      return numeric_host(entry->ifa_addr, family == AF_INET
                                               ? sizeof(sockaddr_in)
                                               : sizeof(sockaddr_in6));
    }
    known.insert(entry->ifa_name);
  }
  SB_FAIL("--interface ", name,
          ": this host has no such network interface, or it has no address; ",
          known.empty()
              ? "none has one"
              : fmt::format("give one of {}", fmt::join(known, ", ")));
}

Descriptor try_connect(const HostPort& address,
                       std::chrono::milliseconds timeout) {
  const AddressList list = resolve(address, /*passive=*/false);
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
    Descriptor socket(::socket(
        entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
        entry->ai_protocol));
    if (!socket.valid()) continue;
    int cause = 0;
    if (connect(socket.value(), entry->ai_addr, entry->ai_addrlen) != 0) {
      cause = errno;
      pollfd waiting{socket.value(), POLLOUT, 0};
      if (cause == EINPROGRESS &&
          poll(&waiting, 1, static_cast<int>(timeout.count())) == 1) {
        socklen_t length = sizeof cause;
        getsockopt(socket.value(), SOL_SOCKET, SO_ERROR, &cause, &length);
      }
    }
    if (cause != 0) continue;
    // A socket may connect to itself on a port without a listener: no peer.
    const HostPort here = own_address(socket);
    const HostPort there = address_of(socket, getpeername);
    if (here.host == there.host && here.port == there.port) continue;
    const int flags = fcntl(socket.value(), F_GETFL);
    fcntl(socket.value(), F_SETFL, flags & ~O_NONBLOCK);
    set_no_delay(socket.value());
    return socket;
  }
  return {};
}

std::string encode_frame(const Frame& frame) {
  std::size_t bytes = 1;
  for (const std::string& field : frame.fields) bytes += 4 + field.size();
  SB_CHECK(bytes <= kMaxFrameBytes, "a control message of ", bytes,
           " bytes exceeds the limit of ", kMaxFrameBytes,
           "; send large data with collectives");
  std::string result;
  result.reserve(4 + bytes);
  append_u32(result, static_cast<std::uint32_t>(bytes));
  result.push_back(static_cast<char>(frame.kind));
  for (const std::string& field : frame.fields) {
    append_u32(result, static_cast<std::uint32_t>(field.size()));
    result += field;
  }
  return result;
}

std::optional<Frame> take_frame(std::string& buffer, std::size_t max_bytes) {
  if (buffer.size() < 4) return {};
  const std::size_t bytes = read_u32(buffer, 0);
  SB_CHECK(bytes >= 1 && bytes <= max_bytes,
           "a control message claims to have ", bytes, " bytes; 1 to ",
           max_bytes, " are allowed");
  if (buffer.size() < 4 + bytes) return {};
  const auto kind = static_cast<unsigned char>(buffer[4]);
  SB_CHECK(kind <= static_cast<unsigned char>(FrameKind::kMail),
           "a control message has the unknown kind ", int{kind});
  Frame frame;
  frame.kind = static_cast<FrameKind>(kind);
  const std::size_t end = 4 + bytes;
  for (std::size_t at = 5; at < end;) {
    SB_CHECK(end - at >= 4 && read_u32(buffer, at) <= end - at - 4,
             "a field of a control message exceeds the message");
    const std::size_t length = read_u32(buffer, at);
    frame.fields.push_back(buffer.substr(at + 4, length));
    at += 4 + length;
  }
  buffer.erase(0, end);
  return frame;
}

void check_fields(const Frame& frame, std::size_t count) {
  SB_CHECK(frame.fields.size() == count, "control message of kind ",
           int(frame.kind), " has ", frame.fields.size(), " fields, not ",
           count);
}

std::int64_t parse_number(const std::string& text, std::int64_t limit) {
  SB_CHECK(!text.empty() && text.size() <= 18 &&
               text.find_first_not_of("0123456789") == std::string::npos,
           "control message: \"", text, "\" is no number");
  const std::int64_t value = std::stoll(text);
  SB_CHECK(value <= limit, "control message: ", value, " exceeds ", limit);
  return value;
}

std::string join_ranks(const std::vector<int>& ranks) {
  return fmt::format("{}", fmt::join(ranks, ","));
}

std::vector<int> split_ranks(const std::string& text, int world_size) {
  std::vector<int> ranks;
  std::istringstream in(text + ',');  // an empty text is refused
  for (std::string rank; std::getline(in, rank, ',');) {
    ranks.push_back(static_cast<int>(parse_number(rank, world_size - 1)));
  }
  return ranks;
}

}  // namespace shardbook::internal
