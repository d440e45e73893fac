// Frames of the control line, and connections that send something else.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "comm/processes/control_line.h"
#include "comm/processes/coordinator.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ControlLine::Options line_to(const Coordinator& coordinator, int rank) {
  ControlLine::Options options;
  const HostPort address{"127.0.0.1", coordinator.port()};
  options.locate = [address] { return std::optional<HostPort>(address); };
  options.rank = rank;
  options.world_size = 2;
  options.timeout = std::chrono::seconds(10);
  return options;
}

Coordinator::Options two_ranks() {
  Coordinator::Options options;
  options.world_size = 2;
  return options;
}

TEST(GlooFrame, ComesOutAsItWentIn) {
  const Frame frame{FrameKind::kMail, {"key", std::string("a\0b", 3), ""}};
  std::string bytes = encode_frame(frame) + encode_frame({});
  const auto first = take_frame(bytes, kMaxFrameBytes);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->kind, frame.kind);
  EXPECT_EQ(first->fields, frame.fields);
  EXPECT_TRUE(take_frame(bytes, kMaxFrameBytes)->fields.empty());
  EXPECT_TRUE(bytes.empty());
}

TEST(GlooFrame, IsAwaitedUntilItIsWhole) {
  const std::string whole = encode_frame({FrameKind::kFail, {"key"}});
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    std::string part = whole.substr(0, bytes);
    EXPECT_FALSE(take_frame(part, kMaxFrameBytes));
  }
}

TEST(GlooFrame, LiesAreRefused) {
  const auto take = [](std::string bytes) { take_frame(bytes, 1000); };
  EXPECT_THROW(take(std::string("\xff\xff\xff\xff\x01", 5)), Error);
  EXPECT_THROW(take(std::string("\0\0\0\0", 4)), Error);
  // An unknown kind, a field longer than its frame, half a field length.
  EXPECT_THROW(take(std::string("\x01\0\0\0\x63", 5)), Error);
  EXPECT_THROW(take(std::string("\x05\0\0\0\x01\xff\xff\0\0", 9)), Error);
  EXPECT_THROW(take(std::string("\x03\0\0\0\x01\0\0", 7)), Error);
}

TEST(GlooAddress, HostAndPortAreRead) {
  EXPECT_EQ(parse_host_port("node7:29500").port, 29500);
  EXPECT_EQ(parse_host_port("[::1]:80").host, "::1");
  for (const char* wrong :
       {"", "host", ":80", "host:", "host:-1", "host:65536", "host:80x"}) {
    EXPECT_THROW(parse_host_port(wrong), Error) << wrong;
  }
}

TEST(GlooCoordinator, StrangersAreTurnedAway) {
  Coordinator coordinator(two_ranks());
  const HostPort address{"127.0.0.1", coordinator.port()};
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100, '\0'),
        encode_frame({FrameKind::kFail, {"mischief"}}),
        encode_frame({FrameKind::kHello, {"0", "2"}}),
        encode_frame({FrameKind::kHello, {"0", "2", "-1"}})}) {
    const Descriptor stranger =
        try_connect(address, std::chrono::milliseconds(1000));
    ASSERT_TRUE(stranger.valid());
    ASSERT_EQ(send(stranger.value(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    char byte;
    EXPECT_LE(recv(stranger.value(), &byte, 1, 0), 0);
  }
  EXPECT_EQ(coordinator.failure(), "");
}

TEST(GlooCoordinator, MailIsAwaited) {
  Coordinator coordinator(two_ranks());
  ControlLine one(line_to(coordinator, 0)), two(line_to(coordinator, 1));
  std::thread sender([&] { one.mail(1, "key", "value"); });
  EXPECT_EQ(two.wait_for_mail("key", "a test", std::chrono::seconds(10)),
            "value");
  sender.join();
}

TEST(GlooCoordinator, TwoProcessesCannotBeOneRank) {
  Coordinator coordinator(two_ranks());
  ControlLine one(line_to(coordinator, 1));
  ControlLine two(line_to(coordinator, 1));
  EXPECT_THAT(two.wait_for_failure(std::chrono::seconds(10)),
              HasSubstr("two processes claim to be rank 1"));
}

TEST(GlooCoordinator, WorldSizesMustAgree) {
  Coordinator coordinator(two_ranks());
  ControlLine::Options options = line_to(coordinator, 2);
  options.world_size = 3;
  ControlLine line(std::move(options));
  EXPECT_THAT(line.wait_for_failure(std::chrono::seconds(10)),
              HasSubstr("world size 3"));
}

TEST(GlooCoordinator, AbsenceIsAnError) {
  ControlLine::Options options;
  options.locate = [] { return std::optional<HostPort>(); };
  options.timeout = std::chrono::milliseconds(50);
  EXPECT_THAT([&] { ControlLine line(std::move(options)); },
              ThrowsMessage<Error>(HasSubstr("found no rank 0")));
}

}  // namespace
}  // namespace shardbook::internal
