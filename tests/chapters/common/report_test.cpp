// The claims of a report: their verdicts and their texts.

#include "chapters/common/run/report.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "chapters/common/run/exit_status.h"
#include "core/context.h"
#include "core/tensor.h"
#include "tests/support/errors.h"

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

/// Prints the report in both forms and returns the exit status. The JSON object
/// has these values (by JSON pointers), the text these parts, and not those.
int print(const Report& report,
          const std::map<std::string, nlohmann::json>& values,
          const std::vector<std::string>& parts = {},
          const std::vector<std::string>& not_those = {},
          Options options = {}) {
  const CommandLine line("test", "");
  ::testing::internal::CaptureStdout();
  const int status = print_report(options, line, report);
  const std::string text = ::testing::internal::GetCapturedStdout();
  expect_text(text, parts);
  for (const std::string& part : not_those) {
    EXPECT_FALSE(has_text(text, part)) << part;
  }
  options.format = "json";
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(print_report(options, line, report), status);
  const auto json =
      nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  for (const auto& [pointer, value] : values) {
    EXPECT_EQ(json.at(nlohmann::json::json_pointer(pointer)), value) << pointer;
  }
  return status;
}

TEST(Report, ClaimsThatHoldPass) {
  const int status = print(good_report(),
                           {{"/claims/numbers", "passed"},
                            {"/claims/bytes", "passed"},
                            {"/claims/memory", "passed"},
                            {"/claims/time", "passed"}},
                           {"500 ms per step by the page's closed form: equal"},
                           {"not predicted"});
  EXPECT_EQ(status, 0);
}

// The formula against the clock, to 1e-9; no claim without a formula.
TEST(Report, TimeIsClaimedByAClosedFormAlone) {
  Report report = good_report();
  report.time.simulated_step_s = 0.5;
  report.time.closed_form_s *= 1 + 2e-9;
  int status =
      print(report, {{"/claims/time", "failed"}}, {"closed form: DIFFERENT"});
  EXPECT_EQ(status, kExitClaimFailed);

  report.time.closed_form_s = kNotPredicted;
  report.time.closed_form_command = "ch02_ddp --cluster textbook";
  status = print(report,
                 {{"/claims/time", "no closed form"},
                  {"/virtual/step_s/closed_form", nullptr},
                  {"/virtual/step_s/simulated", 0.5}},
                 {"no closed form here; one run that has one: "
                  "ch02_ddp --cluster textbook"});
  EXPECT_EQ(status, 0);

  // A GPU has no clock: the formula is compared with the run on shapes
  report.time.step_s = 0;
  report.time.closed_form_s = 0.5;
  print(report,
        {{"/claims/time", "passed"}, {"/virtual/step_s/counted", nullptr}});
  // Without a cluster there is nothing to compare
  report.time = {};
  print(report, {{"/claims/time", "not measured"},
                 {"/fits", nullptr},
                 {"/capacity_bytes", nullptr}});
}

// Peaks are simulated and counted, without a verdict.
TEST(Report, PeaksAreNoClaims) {
  print(good_report(),
        {{"/claims/memory", "passed"},
         {"/peak_memory/1/parameter/simulated", 1536},
         {"/peak_memory/1/parameter/counted", 2048},
         {"/peak_memory/1/total/counted", 2'000'000'000}},
        {"  peak, simulated           953.67 MiB        1.86 GiB\n"});
}

TEST(Report, NothingIsPassedThatWasNotPredicted) {
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kGradient);
  report.ranks[1].held[kind].predicted = kNotPredicted;
  int status = print(report,
                     {{"/claims/memory", "not predicted"},
                      {"/claims/bytes", "passed"},
                      {"/held_memory/1/gradient/predicted", nullptr}},
                     {"gradients              not predicted"});
  EXPECT_EQ(status, 0);

  report = good_report();
  report.ranks[0].bytes.predicted = kNotPredicted;
  status = print(report, {{"/claims/bytes", "not predicted"}},
                 {"bytes sent             not predicted"});
  EXPECT_EQ(status, 0);

  // What nobody counted needs no prediction
  report = good_report();
  report.ranks[0].held[0] = {kNotPredicted, 0};
  print(report, {{"/claims/memory", "passed"}});

  // It excuses no claim that fails
  report.ranks[0].held[0].counted = 7;
  report.ranks[1].held[1].counted += 1;
  status = print(report, {{"/claims/memory", "failed"}});
  EXPECT_EQ(status, kExitClaimFailed);
}

// The number of an expert's rows depends on the data.
TEST(Report, NoClaimIsMadeOfWhatDependsOnTheData) {
  Report report = good_report();
  const auto kind = static_cast<std::size_t>(MemoryKind::kActivation);
  report.ranks[0].held[kind] = {kNoClaim, 4096};
  print(report, {{"/claims/memory", "passed"}}, {}, {"not predicted"});
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
}

TEST(Report, SaysWhenAModelDoesNotFit) {
  Report report = good_report();
  print(report, {{"/fits", true}, {"/capacity_bytes", 80'000'000'000}}, {},
        {"does not fit"});

  // One rank is enough
  report.ranks[1].peak_total.counted = 324e9;
  const int status = print(report, {{"/fits", false}},
                           {"does not fit: 324 of 80 GB", "500 ms per step"});
  EXPECT_EQ(status, 0);

  // --device-memory overrides the capacity
  Options options;
  options.device_memory_bytes = 400'000'000'000;
  print(report, {{"/fits", true}, {"/capacity_bytes", 400'000'000'000}}, {},
        {"does not fit"}, options);
}

TEST(Report, SaysWhatTheLastBitDoes) {
  Report report = good_report();
  print(report, {{"/parity/last_bit", nullptr}});
  report.parity.last_bit = 2.5e-3;
  print(report, {{"/parity/last_bit", 2.5e-3}},
        {"differ in their last bit: 0.0025"});
}

// Where one device diverges as well, no claim fails.
TEST(Report, SaysWhoseNumbersAreNotFinite) {
  Report report = good_report();
  report.not_finite = "'w' is not finite after the last step";
  report.parity.passed = false;
  const int status = print(report, {{"/parity/one_device_finite", true}},
                           {"last step; one device's numbers are finite"});
  EXPECT_EQ(status, 1);
  report.parity.one_device_finite = false;
  print(report, {{"/parity/one_device_finite", false}},
        {"last step: nothing to compare"});
}

}  // namespace
}  // namespace shardbook
