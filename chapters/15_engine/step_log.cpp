#include "chapters/15_engine/internal/step_log.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "core/context.h"
#include "core/stream.h"

namespace shardbook::engine::internal {
namespace {

/// Seconds, after the device has finished its work.
double now_s() {
  if (RankContext::current().device.is_cuda()) {
    Event event;
    event.record();
    event.synchronize();
  }
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

StepLog::StepLog(const DeepSpeedConfig& config, bool is_main)
    : write([](const std::string& line) {
        std::fprintf(stderr, "%s\n", line.c_str());
      }),
      is_main_(is_main),
      times_calls_(config.wall_clock_breakdown),
      is_adam_(config.optimizer.type != "SGD"),
      every_(config.steps_per_print) {}

void StepLog::begin(const std::string& call) {
  if (times_calls_) began_s_[call] = now_s();
}

void StepLog::end(const std::string& call) {
  const auto began = began_s_.find(call);
  if (began == began_s_.end()) return;
  seconds_[call] += now_s() - began->second;
  began_s_.erase(began);
}

void StepLog::step(std::int64_t global_steps, std::int64_t skipped,
                   const OptimizerOptions& options) {
  if (is_main_ && every_ > 0 && global_steps % every_ == 0) {
    write(fmt::format(
        "step={}, skipped={}, lr={}, mom={}", global_steps, skipped, options.lr,
        is_adam_ ? fmt::format("({}, {})", options.beta1, options.beta2)
                 : fmt::format("{}", options.momentum)));
  }
  if (is_main_ && times_calls_) {
    std::string line = "time (ms)";
    for (const auto& [call, seconds] : seconds_) {
      line += fmt::format(" | {}: {:.2f}", call, seconds * 1e3);
    }
    write(line);
  }
  seconds_.clear();
}

}  // namespace shardbook::engine::internal
