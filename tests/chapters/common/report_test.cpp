// The claims of a report: their verdicts and their texts.

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
    for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
      each.held[k] = {10.0 * rank, 10.0 * rank};
    }
    each.peak[0] = {1536.0, 2048.0};
    each.peak_total = {1e9, 1e9 * (rank + 1)};
    report.ranks.push_back(each);
  }
  report.time.cluster = "textbook";
  report.time.step_s = report.time.closed_form_s = 0.5;
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
  EXPECT_TRUE(
      says(printed, "500 ms per step by the page's closed form: equal"));
}

// The formula against the clock, to 1e-9; no claim without a formula.
TEST(Report, TimeIsClaimedByAClosedFormAlone) {
  Report report = good_report();
  report.time.simulated_step_s = 0.5;
  report.time.closed_form_s *= 1 + 2e-9;
  Printed printed = print(report);
  EXPECT_EQ(printed.status, kExitClaimFailed);
  EXPECT_EQ(printed.json["claims"]["time"], "failed");
  EXPECT_TRUE(says(printed, "closed form: DIFFERENT"));

  report.time.closed_form_s = kNotPredicted;
  report.time.closed_form_command = "ch02_ddp --cluster textbook";
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["time"], "no closed form");
  EXPECT_TRUE(printed.json["virtual"]["step_s"]["closed_form"].is_null());
  EXPECT_EQ(printed.json["virtual"]["step_s"]["simulated"], 0.5);
  EXPECT_TRUE(says(printed,
                   "no closed form here; one run that has one: "
                   "ch02_ddp --cluster textbook"));

  // A GPU has no clock: the formula is compared with the run on shapes
  report.time.step_s = 0;
  report.time.closed_form_s = 0.5;
  printed = print(report);
  EXPECT_EQ(printed.json["claims"]["time"], "passed");
  EXPECT_TRUE(printed.json["virtual"]["step_s"]["counted"].is_null());
}

// Peaks are simulated and counted, without a verdict.
TEST(Report, PeaksAreNoClaims) {
  const Printed printed = print(good_report());
  EXPECT_EQ(printed.json["claims"]["memory"], "passed");
  EXPECT_EQ(printed.json["peak_memory"][1]["parameter"]["simulated"], 1536);
  EXPECT_EQ(printed.json["peak_memory"][1]["parameter"]["counted"], 2048);
  EXPECT_TRUE(says(printed,
                   "  peak, simulated           953.67 MiB        1.86 GiB\n"));
}

TEST(Report, NothingIsPassedThatWasNotPredicted) {
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kGradient);
  report.ranks[1].held[kind].predicted = kNotPredicted;
  Printed printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["memory"], "not predicted");
  EXPECT_EQ(printed.json["claims"]["bytes"], "passed");
  EXPECT_TRUE(
      printed.json["held_memory"][1]["gradient"]["predicted"].is_null());
  EXPECT_TRUE(says(printed, "gradients              not predicted"));

  report = good_report();
  report.ranks[0].bytes.predicted = kNotPredicted;
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["claims"]["bytes"], "not predicted");
  EXPECT_TRUE(says(printed, "bytes sent             not predicted"));
}

TEST(Report, AClaimThatFailsIsNotExcusedByOneThatIsNotPredicted) {
  Report report = good_report();
  report.ranks[0].held[0].predicted = kNotPredicted;
  report.ranks[0].held[0].counted = 7;
  report.ranks[1].held[1].counted += 1;
  const Printed printed = print(report);
  EXPECT_EQ(printed.status, kExitClaimFailed);
  EXPECT_EQ(printed.json["claims"]["memory"], "failed");
}

TEST(Report, WhatNobodyCountedNeedsNoPrediction) {
  Report report = good_report();
  report.ranks[0].held[0] = {kNotPredicted, 0};
  EXPECT_EQ(print(report).json["claims"]["memory"], "passed");
}

// The number of an expert's rows depends on the data.
TEST(Report, NoClaimIsMadeOfWhatDependsOnTheData) {
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kActivation);
  report.ranks[0].held[kind] = {kNoClaim, 4096};
  const Printed printed = print(report);
  EXPECT_EQ(printed.json["claims"]["memory"], "passed");
  EXPECT_FALSE(says(printed, "not predicted"));
}

// States after an update, activations after a forward; without an update,
// parameters are counted too.
TEST(Report, HeldIsCountedAtTheMomentsThatAreNamed) {
  RankContext context(Device::cpu(5));
  const RankContext::Scope scope(context);
  const auto held = [&](MemoryKind kind) {
    return rank_report(Bill(), 0, context.device)
        .held[static_cast<std::size_t>(kind)]
        .counted;
  };
  const auto make = [](MemoryKind kind, std::int64_t n) {
    const MemoryScope of(kind);
    return Tensor::zeros({n});
  };
  Tensor weight = make(MemoryKind::kParameter, 4);
  weight.set_requires_grad(true);
  EXPECT_EQ(held(MemoryKind::kParameter), 16);
  const auto optimizer = make_optimizer("adam", {weight}, {});
  {
    const Tensor kept = make(MemoryKind::kActivation, 8);
    note_kept_activations();
    const Tensor passing = make(MemoryKind::kActivation, 8);
  }
  { const Tensor passing = make(MemoryKind::kGradient, 8); }
  weight.set_grad(make(MemoryKind::kGradient, 4));
  optimizer->step();
  weight.clear_grad();
  EXPECT_EQ(held(MemoryKind::kGradient), 16);
  EXPECT_EQ(held(MemoryKind::kOptimizerState), 32);
  EXPECT_EQ(held(MemoryKind::kActivation), 32);
}

// The peak of all memory in use at one time, not the sum of peaks by kind.
TEST(Report, TheTotalPeakIsOfOneMoment) {
  RankContext context(Device::cpu(6));
  const RankContext::Scope scope(context);
  context.device.reset_peak_memory();
  for (const MemoryKind kind :
       {MemoryKind::kGradient, MemoryKind::kActivation}) {
    const MemoryScope of(kind);
    Tensor::empty({256});
  }
  const RankReport rank = rank_report(Bill(), 0, context.device);
  EXPECT_EQ(rank.peak[static_cast<std::size_t>(MemoryKind::kGradient)].counted,
            1024);
  EXPECT_EQ(rank.peak_total.counted, 1024);
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
  report.ranks[1].peak_total.counted = 324e9;
  printed = print(report);
  EXPECT_EQ(printed.status, 0);
  EXPECT_EQ(printed.json["fits"], false);
  EXPECT_TRUE(says(printed, "does not fit: 324 of 80 GB"));
  EXPECT_TRUE(says(printed, "500 ms per step"));

  // --device-memory overrides the capacity
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

// Where one device diverges as well, no claim fails.
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
