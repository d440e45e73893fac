// Frames of the control line, and connections that send something else.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "comm/processes/control_line.h"
#include "comm/processes/coordinator.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using std::chrono::milliseconds;

ControlLine::Options line_to(const Coordinator& coordinator, int rank) {
  ControlLine::Options options;
  options.locate = [address = coordinator.address()] {
    return ServingPlace{{address}, ""};
  };
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

// A part of a name has at most 63 letters, so nobody is asked for it.
const std::string kNoHost(64, 'x');

// The error of a rank that cannot join.
std::string refusal(ControlLine::Options options) {
  try {
    const ControlLine line(std::move(options));
    return "";
  } catch (const Error& error) {
    return error.what();
  }
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
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100, '\0'),
        encode_frame({FrameKind::kFail, {"mischief"}}),
        encode_frame({FrameKind::kHello, {"0", "2"}}),
        encode_frame({FrameKind::kHello, {"0", "2", "-1", "", ""}})}) {
    std::string cause;
    const Descriptor stranger =
        try_connect(coordinator.address(), milliseconds(1000), &cause);
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

TEST(GlooCoordinator, RanksOfAnotherJobAreTurnedAwayUnharmed) {
  Coordinator::Options serving = two_ranks();
  serving.job = "mpirun 1";
  Coordinator coordinator(std::move(serving));
  const auto rank_of = [&](int rank, const std::string& job) {
    ControlLine::Options options = line_to(coordinator, rank);
    options.job = job;
    return options;
  };
  ControlLine one(rank_of(1, "mpirun 1"));
  for (const std::string job : {"mpirun 2", ""}) {
    ControlLine::Options stranger = rank_of(1, job);
    stranger.world_size = 7;
    stranger.timeout = milliseconds(50);
    EXPECT_THAT(
        refusal(std::move(stranger)),
        HasSubstr("the ranks of another job (mpirun 1) meet there; give every "
                  "job on a host a --rendezvous of its own"));
  }
  EXPECT_EQ(coordinator.failure(), "");
  ControlLine two(rank_of(0, "mpirun 1"));
  EXPECT_EQ(one.failure(), "");
}

TEST(GlooCoordinator, ARankOfAnEarlierRunIsTurnedAway) {
  Coordinator::Options serving = two_ranks();
  serving.serial = "new";
  Coordinator coordinator(std::move(serving));
  ControlLine::Options options = line_to(coordinator, 1);
  options.locate = [address = coordinator.address()] {
    return ServingPlace{{address}, "old"};
  };
  options.timeout = milliseconds(50);
  EXPECT_THAT(refusal(std::move(options)), HasSubstr("another job"));
}

TEST(GlooCoordinator, ListensOnlyUntilAllRanksHaveCome) {
  Coordinator::Options serving = two_ranks();
  serving.generation = 0;
  Coordinator coordinator(std::move(serving));
  ControlLine one(line_to(coordinator, 0)), two(line_to(coordinator, 1));
  std::string cause;
  EXPECT_FALSE(
      try_connect(coordinator.address(), milliseconds(1000), &cause).valid());
  EXPECT_EQ(cause, "Connection refused");
  // So the next job may serve there.
  EXPECT_TRUE(listen_on(coordinator.address()).valid());
}

// The port of an earlier run may belong to another program now, which answers
// nothing, or no frame.
TEST(GlooCoordinator, IsFoundWhileAnotherProgramServesAtItsEarlierAddress) {
  Coordinator::Options serving = two_ranks();
  serving.serial = "new";
  Coordinator coordinator(std::move(serving));
  const Descriptor silent = listen_on({"127.0.0.1", 0});
  std::atomic<int> num_asked{0};
  ControlLine::Options options = line_to(coordinator, 1);
  options.timeout = milliseconds(2000);
  options.locate = [&, address = coordinator.address()] {
    // The file changes after it has been read once.
    return ++num_asked == 1 ? ServingPlace{{own_address(silent)}, "old"}
                            : ServingPlace{{address}, "new"};
  };
  EXPECT_EQ(refusal(std::move(options)), "");
}

TEST(GlooCoordinator, IsFoundAtOneOfSeveralAddresses) {
  Coordinator coordinator(two_ranks());
  ControlLine::Options options = line_to(coordinator, 1);
  int free = 0;
  {
    const Descriptor nobody = listen_on({"127.0.0.1", 0});
    free = own_address(nobody).port;
  }
  options.locate = [=, address = coordinator.address()] {
    return ServingPlace{{{"127.0.0.1", free}, {kNoHost, free}, address}, ""};
  };
  EXPECT_EQ(refusal(std::move(options)), "");
}

TEST(GlooCoordinator, AbsenceIsAnError) {
  ControlLine::Options options;
  options.coordinator_name = "the launcher";
  options.timeout = milliseconds(50);
  options.locate = [] { return ServingPlace{}; };
  EXPECT_EQ(refusal(options),
            "rendezvous: rank 0 did not reach the launcher within 50 ms: the "
            "launcher has published no address");
  // A name may be known later, so it is looked up until the end.
  options.locate = [] { return ServingPlace{{{kNoHost, 1}}, ""}; };
  EXPECT_THAT(refusal(options),
              AllOf(HasSubstr("rank 0 did not reach the launcher at " +
                              kNoHost + ":1 within 50 ms: "),
                    HasSubstr("; give a name that every rank knows by "
                              "--rendezvous or MASTER_ADDR")));
}

}  // namespace
}  // namespace shardbook::internal
