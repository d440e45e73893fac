// Ranks on two hosts, played by network namespaces.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tests/comm/program.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using test::Program;
using test::Variables;
using ::testing::HasSubstr;

// Two network namespaces joined by a cable, as the ranks see them.
class TwoHosts {
 public:
  TwoHosts() {
    const std::string id = std::to_string(getpid());
    a_ = "sba" + id;
    b_ = "sbb" + id;
    works_ = run("ip netns add " + a_) && run("ip netns add " + b_) &&
             run("ip link add va" + id + " netns " + a_ + " type veth peer vb" +
                 id + " netns " + b_) &&
             run("ip -n " + a_ + " addr add 10.77.0.1/24 dev va" + id) &&
             run("ip -n " + b_ + " addr add 10.77.0.2/24 dev vb" + id) &&
             run("ip -n " + a_ + " link set va" + id + " up") &&
             run("ip -n " + b_ + " link set vb" + id + " up") &&
             run("ip -n " + a_ + " link set lo up") &&
             run("ip -n " + b_ + " link set lo up");
  }
  ~TwoHosts() {
    run("ip netns del " + a_);
    run("ip netns del " + b_);
  }
  bool works() const { return works_; }
  void cut_cable() {
    run("ip -n " + a_ + " link set va" + a_.substr(3) + " down");
  }
  Variables on_first(const Variables& command) const { return on(a_, command); }
  Variables on_second(const Variables& command) const {
    return on(b_, command);
  }

 private:
  static bool run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }
  static Variables on(const std::string& host, const Variables& command) {
    Variables all = {"ip", "netns", "exec", host};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }

  std::string a_, b_;
  bool works_ = false;
};

Variables on_hosts(const std::string& rank, const std::string& more) {
  return {"RANK=" + rank,
          "WORLD_SIZE=2",
          "LOCAL_WORLD_SIZE=1",
          "LOCAL_RANK=0",
          "MASTER_ADDR=10.77.0.1",
          "MASTER_PORT=29500",
          more};
}

/// Two ranks on two hosts meet and sum; the second begins first.
void expect_sum(const TwoHosts& hosts, const Variables& of_first,
                const Variables& of_second) {
  const Variables command = test::rank_program("gloo", 2, "sum");
  Program second(hosts.on_second(command), of_second);
  Program first(hosts.on_first(command), of_first);
  EXPECT_EQ(first.finish(), 0) << first.output();
  EXPECT_EQ(second.finish(), 0) << second.output();
  EXPECT_EQ(first.output(), "sum 1 of 2\nsum 1 of 2\n");
}

class GlooHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts.works()) {
      GTEST_SKIP() << "network namespaces need root and the ip command";
    }
  }
  TwoHosts hosts;
};

TEST_F(GlooHosts, RanksMeetOverANetwork) {
  const auto torchrun = [](const std::string& rank) {
    return on_hosts(rank, "SHARDBOOK_TIMEOUT_MS=20000");
  };
  const auto srun = [](const std::string& rank) {
    return Variables{"SLURM_STEP_ID=0",
                     "SLURM_PROCID=" + rank,
                     "SLURM_NTASKS=2",
                     "SLURM_LOCALID=0",
                     "SLURM_NODEID=" + rank,
                     "SLURM_STEP_TASKS_PER_NODE=1(x2)",
                     "SLURM_STEP_NODELIST=10.77.0.[1-2]",
                     "SLURM_LAUNCH_NODE_IPADDR=203.0.113.5"};
  };
  expect_sum(hosts, torchrun("0"), torchrun("1"));
  expect_sum(hosts, srun("0"), srun("1"));
}

TEST_F(GlooHosts, RankZeroMayCallItsHostLocalhost) {
  expect_sum(hosts, on_hosts("0", "MASTER_ADDR=localhost"),
             on_hosts("1", "SHARDBOOK_TIMEOUT_MS=20000"));
}

TEST_F(GlooHosts, RanksMeetInAFolder) {
  const TempFolder temporary;
  const auto variables = [&](const std::string& rank) {
    return on_hosts(rank, "SHARDBOOK_RENDEZVOUS=file:" + temporary.path());
  };
  expect_sum(hosts, variables("0"), variables("1"));
}

TEST(GlooOneHost, AHostWithoutLoopbackIsToldSo) {
  Variables command = {"unshare", "-n"};
  for (const auto& word : test::rank_program("gloo", 2, "sum")) {
    command.push_back(word);
  }
  Program ranks(command);
  const int status = ranks.finish();
  if (status == 127 || ranks.output().find("unshare: ") == 0) {
    GTEST_SKIP() << "network namespaces need root and the unshare command";
  }
  EXPECT_EQ(ranks.output(),
            "the ranks of a host meet on its loopback network, which does not "
            "work: Network is unreachable; is the interface lo of this host "
            "up?\n");
}

TEST_F(GlooHosts, BothSidesOfACutCableNameTheOther) {
  const Variables command = test::rank_program("gloo", 2, "reduce");
  Program second(hosts.on_second(command),
                 on_hosts("1", "SHARDBOOK_TIMEOUT_MS=3000"));
  Program first(hosts.on_first(command),
                on_hosts("0", "SHARDBOOK_TIMEOUT_MS=3000"));
  first.read_until("ready");
  second.read_until("ready");
  hosts.cut_cable();
  EXPECT_EQ(first.finish(), 1);
  EXPECT_EQ(second.finish(), 1);
  EXPECT_THAT(first.output(), HasSubstr("rank 1 does not answer"));
  EXPECT_THAT(second.output(), HasSubstr("rank 0 does not answer"));
}

}  // namespace
}  // namespace shardbook
