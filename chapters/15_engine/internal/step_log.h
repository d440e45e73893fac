#pragma once

// The lines that an engine writes: every n steps, and how long its calls took.

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "chapters/15_engine/deepspeed_config.h"
#include "core/optim.h"

namespace shardbook::engine::internal {

class StepLog {
 public:
  /// Writes to stderr, on the main rank.
  StepLog(const DeepSpeedConfig& config, bool is_main);

  /// Time a call. With wall_clock_breakdown the device is synchronised on both
  /// ends, so nothing that it does overlaps another call.
  void begin(const std::string& call);
  void end(const std::string& call);
  /// An optimizer step has ended.
  void step(std::int64_t global_steps, std::int64_t skipped,
            const OptimizerOptions& options);

  std::function<void(const std::string& line)> write;

 private:
  const bool is_main_, times_calls_, is_adam_;
  const std::int64_t every_;
  std::map<std::string, double> began_s_, seconds_;
};

}  // namespace shardbook::engine::internal
