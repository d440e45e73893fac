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
#include <thread>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// An empty list, and the cause, where the name is not known.
AddressList resolve(const HostPort& address, bool passive, std::string* cause) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int status =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(),
                  &hints, &list);
  if (status != 0) {
    *cause = std::string(gai_strerror(status)) +
             "; give a name that every rank knows by --rendezvous or "
             "MASTER_ADDR";
    list = nullptr;
  }
  return {list, &freeaddrinfo};
}

void set_no_delay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string numeric_host(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  // A socket of IPv6 shows a peer of IPv4 so.
  const std::string mapped = "::ffff:";
  return std::string(host).rfind(mapped, 0) == 0 ? host + mapped.size() : host;
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

std::string host_port_text(const HostPort& address) {
  const std::string& host = address.host;
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(address.port);
}

namespace {

// Listens on the first address of the list that can be served.
Descriptor listen_on_first(const AddressList& list, int* cause) {
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
    Descriptor socket(::socket(entry->ai_family,
                               entry->ai_socktype | SOCK_CLOEXEC,
                               entry->ai_protocol));
    const int on = 1, off = 0;
    if (socket.valid()) {
      setsockopt(socket.value(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    // A socket of IPv6 also serves IPv4.
    if (socket.valid() && entry->ai_family == AF_INET6) {
      setsockopt(socket.value(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (socket.valid() &&
        bind(socket.value(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        listen(socket.value(), SOMAXCONN) == 0) {
      return socket;
    }
    *cause = errno;
  }
  return {};
}

}  // namespace

Descriptor listen_on(const HostPort& address,
                     std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  const bool is_all = address.host == kAllAddresses;
  const auto give_up = Clock::now() + patience;
  for (;;) {
    std::string unknown;
    int cause = 0;
    // A host may be without IPv6.
    for (const std::string& host :
         is_all ? std::vector<std::string>{"::", "0.0.0.0"}
                : std::vector<std::string>{address.host}) {
      const AddressList list =
          resolve({host, address.port}, /*passive=*/true, &unknown);
      SB_CHECK(list != nullptr, "rendezvous: cannot resolve host \"", host,
               "\": ", unknown);
      Descriptor socket = listen_on_first(list, &cause);
      if (socket.valid()) return socket;
    }
    SB_CHECK(
        cause == EADDRINUSE && Clock::now() < give_up,
        "rendezvous: cannot listen on ",
        is_all ? fmt::format("port {}", address.port) : host_port_text(address),
        ": ", std::strerror(cause),
        "; rank 0 must run on the host that the address names, and the port "
        "must be free: give every job on a host a --rendezvous of its own");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

HostPort own_address(const Descriptor& socket) {
  return address_of(socket, getsockname);
}

bool is_loopback(const std::string& host) {
  return host.rfind("127.", 0) == 0 || host == "::1";
}

bool is_name_of_loopback(const std::string& host) {
  std::string unknown;
  const AddressList list = resolve({host, 0}, /*passive=*/false, &unknown);
  return list == nullptr ||
         is_loopback(numeric_host(list->ai_addr, list->ai_addrlen));
}

namespace {

// Names of the interfaces of this host with their addresses, in its order.
std::vector<std::pair<std::string, std::string>> interfaces() {
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(raw,
                                                              &freeifaddrs);
  std::vector<std::pair<std::string, std::string>> result;
  for (const ifaddrs* entry = raw; entry; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    result.emplace_back(entry->ifa_name,
                        numeric_host(entry->ifa_addr,
                                     family == AF_INET ? sizeof(sockaddr_in)
                                                       : sizeof(sockaddr_in6)));
  }
  return result;
}

}  // namespace

std::string interface_host(const std::string& name) {
  std::set<std::string> known;
  for (const auto& [interface, host] : interfaces()) {
    if (interface == name) return host;
    known.insert(interface);
  }
  SB_FAIL("--interface ", name,
          ": this host has no such network interface, or it has no address; ",
          known.empty()
              ? "none has one"
              : fmt::format("give one of {}", fmt::join(known, ", ")));
}

std::vector<std::string> host_addresses() {
  std::vector<std::string> result = {"127.0.0.1"};
  for (const auto& [interface, host] : interfaces()) {
    // An address with "%eth0" has a meaning on its own cable alone.
    const bool is_local = host.find('%') != std::string::npos;
    if (!is_local && !is_loopback(host)) result.push_back(host);
  }
  return result;
}

Descriptor try_connect(const HostPort& address,
                       std::chrono::milliseconds timeout, std::string* cause) {
  const AddressList list = resolve(address, /*passive=*/false, cause);
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
    Descriptor socket(::socket(
        entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
        entry->ai_protocol));
    if (!socket.valid()) continue;
    int error = 0;
    if (connect(socket.value(), entry->ai_addr, entry->ai_addrlen) != 0) {
      error = errno;
      pollfd waiting{socket.value(), POLLOUT, 0};
      if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        if (poll(&waiting, 1, static_cast<int>(timeout.count())) == 1) {
          socklen_t length = sizeof error;
          getsockopt(socket.value(), SOL_SOCKET, SO_ERROR, &error, &length);
        }
      }
    }
    *cause = std::strerror(error);
    if (error == ENETUNREACH && is_loopback(address.host)) {
      *cause += "; is the interface lo of this host up?";
    }
    if (error != 0) continue;
    // A socket may connect to itself on a port without a listener: no peer.
    const HostPort here = own_address(socket);
    *cause = std::strerror(ECONNREFUSED);
    if (here == address_of(socket, getpeername)) continue;
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
  SB_CHECK(kind <= static_cast<unsigned char>(FrameKind::kStranger),
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
