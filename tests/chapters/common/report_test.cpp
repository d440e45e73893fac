// The claims of a report: what is judged, and what is said.

#include "chapters/common/run/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {
namespace {

/// A run of two ranks in which everything is as predicted.
Report good_report() {
  Report report;
  report.chapter = "02_ddp";
  report.parity.checked = report.parity.passed = true;
  for (int rank = 0; rank < 2; ++rank) {
    RankReport each;
    each.bytes = {100.0 + rank, 100.0 + rank};
    for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
      each.peak[k] = {10.0 * rank, 10.0 * rank};
    }
    each.peak_total = 1e9 * (rank + 1);
    report.ranks.push_back(each);
  }
  report.time.cluster = "dgx-a100";
  report.time.step_s = report.time.predicted_step_s = 0.5;
  report.time.capacity_bytes = 80e9;
  return report;
}

struct Printed {
  int status = 0;
  std::string text;
  nlohmann::json json;
};

Printed print(const Report& report, Options options = {}) {
  const CommandLine line("test", "");
  Printed printed;
  ::testing::internal::CaptureStdout();
  printed.status = print_report(options, line, report);
  printed.text = ::testing::internal::GetCapturedStdout();
  options.format = "json";
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(print_report(options, line, report), printed.status);
  printed.json =
      nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  return printed;
}

bool says(const Printed& printed, const std::string& part) {
  return printed.text.find(part) != std::string::npos;
}

TEST(Report, ClaimsThatHoldPass) {
  const Printed printed = print(good_report());
  EXPECT_EQ(printed.status, 0);
  for (const char* claim : {"numbers", "bytes", "memory", "time"}) {
    EXPECT_EQ(printed.json["claims"][claim], "passed") << claim;
  }
  EXPECT_FALSE(says(printed, "not predicted"));
  EXPECT_TRUE(says(printed, "as predicted"));
}

TEST(Report, NothingIsPassedThatWasNotPredicted) {
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kGradient);
  report.ranks[1].peak[kind].predicted = kNotPredicted;
  Printed printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["memory"], "not predicted");
  EXPECT_EQ(printed.json["claims"]["bytes"], "passed");
  EXPECT_TRUE(
      printed.json["peak_memory"][1]["gradient"]["predicted"].is_null());
  EXPECT_TRUE(says(printed, "peak gradient          not predicted"));

  report = good_report();
  report.ranks[0].bytes.predicted = kNotPredicted;
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["bytes"], "not predicted");
  EXPECT_TRUE(says(printed, "bytes sent             not predicted"));

  report = good_report();
  report.time.predicted_step_s = kNotPredicted;
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["time"], "not predicted");
  EXPECT_TRUE(says(printed, ": not predicted"));
}

TEST(Report, AClaimThatFailsIsNotExcusedByOneThatIsNotPredicted) {
  Report report = good_report();
  report.ranks[0].peak[0].predicted = kNotPredicted;
  report.ranks[0].peak[0].counted = 7;
  report.ranks[1].peak[1].counted += 1;
  const Printed printed = print(report);
  EXPECT_EQ(printed.status, kExitClaimFailed);
  EXPECT_EQ(printed.json["claims"]["memory"], "failed");
}

TEST(Report, WhatNobodyCountedNeedsNoPrediction) {
  Report report = good_report();
  report.ranks[0].peak[0] = {kNotPredicted, 0};
  EXPECT_EQ(print(report).json["claims"]["memory"], "passed");
}

TEST(Report, NoClaimIsMadeOfScratchMemory) {
  const MemoryBill bill;
  EXPECT_EQ(bill.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)],
            kNoClaim);
  EXPECT_EQ(bill.bytes[static_cast<std::size_t>(MemoryKind::kGradient)],
            kNotPredicted);
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kWorkspace);
  report.ranks[0].peak[kind] = {kNoClaim, 4096};
  const Printed printed = print(report);
  EXPECT_EQ(printed.json["claims"]["memory"], "passed");
  EXPECT_FALSE(says(printed, "not predicted"));
}

// Of what is in use at one time; not the sum of the peaks of the kinds.
TEST(Report, TheTotalPeakIsOfOneMoment) {
  RankContext context(Device::cpu(6));
  const RankContext::Scope scope(context);
  context.device.reset_peak_memory();
  for (const MemoryKind kind :
       {MemoryKind::kGradient, MemoryKind::kActivation}) {
    const MemoryScope of(kind);
    Tensor::empty({256});
  }
  const RankReport rank = rank_report(0, 0, MemoryBill(), context.device);
  EXPECT_EQ(rank.peak[static_cast<std::size_t>(MemoryKind::kGradient)].counted,
            1024);
  EXPECT_EQ(rank.peak_total, 1024);
  EXPECT_EQ(print(good_report()).json["peak_memory"][1]["total"]["counted"],
            2'000'000'000);
}

TEST(Report, NoTimeIsNotMeasured) {
  Report report = good_report();
  report.time = {};
  const Printed printed = print(report);
  EXPECT_EQ(printed.json["claims"]["time"], "not measured");
  EXPECT_TRUE(printed.json["fits"].is_null());
  EXPECT_TRUE(printed.json["capacity_bytes"].is_null());
}

TEST(Report, SaysWhenAModelDoesNotFit) {
  Report report = good_report();
  Printed printed = print(report);
  EXPECT_EQ(printed.json["fits"], true);
  EXPECT_EQ(printed.json["capacity_bytes"], 80'000'000'000);
  EXPECT_FALSE(says(printed, "does not fit"));

  // One rank is enough
  report.ranks[1].peak_total = 324e9;
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["fits"], false);
  EXPECT_TRUE(says(printed, "does not fit: 324 of 80 GB"));
  EXPECT_TRUE(says(printed, "500 ms per step"));

  // --device-memory says otherwise
  Options options;
  options.device_memory_bytes = 400'000'000'000;
  printed = print(report, options);
  EXPECT_EQ(printed.json["fits"], true);
  EXPECT_EQ(printed.json["capacity_bytes"], 400'000'000'000);
  EXPECT_FALSE(says(printed, "does not fit"));
}

TEST(Report, SaysWhatTheLastBitDoes) {
  Report report = good_report();
  EXPECT_TRUE(print(report).json["parity"]["last_bit"].is_null());
  report.parity.last_bit = 2.5e-3;
  const Printed printed = print(report);
  EXPECT_EQ(printed.json["parity"]["last_bit"], 2.5e-3);
  EXPECT_TRUE(says(printed, "differ in their last bit: 0.0025"));
}

// Where one device diverges as well, nobody is wrong.
TEST(Report, SaysWhoseNumbersAreNotFinite) {
  Report report = good_report();
  report.not_finite = "'w' is not finite after the last step";
  report.parity.passed = false;
  Printed printed = print(report);
  EXPECT_EQ(printed.status, 1);
  EXPECT_TRUE(says(printed, "last step; one device's numbers are finite"));
  EXPECT_EQ(printed.json["parity"]["one_device_finite"], true);
  report.parity.one_device_finite = false;
  printed = print(report);
  EXPECT_TRUE(says(printed, "last step: nothing to compare"));
  EXPECT_EQ(printed.json["parity"]["one_device_finite"], false);
}

}  // namespace
}  // namespace shardbook
