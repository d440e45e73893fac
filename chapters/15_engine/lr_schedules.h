#pragma once

// DeepSpeed's learning-rate schedules: a warm-up, and a descent after it.
//
//   rate
//   max |         .------          WarmupLR
//       |      .'    '.
//       |    .'         '.         WarmupDecayLR
//   min |__.'_______________ step
//        0 1    n         T
//
// A scheduler steps AFTER the optimizer, and counts from -1: the first two
// optimizer steps both have the smallest rate. With DeepSpeed's usual minimum of
// 0 they change nothing. A test that looks for changed weights begins at step 3.
//
// microsoft/DeepSpeed, deepspeed/runtime/lr_schedules.py, WarmupLR.

#include <cstdint>
#include <utility>

#include "core/optim.h"

namespace shardbook::engine {

struct WarmupOptions {
  double min_lr = 0;
  double max_lr = 1e-3;
  std::int64_t num_steps = 1000;  ///< at least 2 are used
  bool is_log = true;             ///< ln(it + 1) / ln(n), not it / n
  /// WarmupDecayLR: the rate reaches min_lr at this step; 0: no descent.
  std::int64_t total_steps = 0;
};

/// The rate after scheduler step `it`; -1: before the first.
///
///   gamma(-1) = 0
///   gamma(it) = ln(it + 1) / ln(n), or it / n       it < n
///               1, or max(0, (T - it) / max(1, T - n))  after that
///   rate      = min + (max - min) gamma,  n = max(2, num_steps)
double warmup_lr(const WarmupOptions& options, std::int64_t it);

/// The rate of optimizer step k = 0, 1, ... when no step is skipped:
/// warmup_lr(k - 1).
LrSchedule warmup_schedule(const WarmupOptions& options);

/// The rate of optimizer steps, one after another. A user may give the engine one
/// of these in place of the config's.
class LrScheduler {
 public:
  explicit LrScheduler(LrSchedule rate) : rate_(std::move(rate)) {}
  /// Call it after an optimizer step that was not skipped.
  void step() { steps_ += 1; }
  /// The rate of the next optimizer step.
  double lr() const { return rate_(steps_); }
  /// Steps so far, and back: for checkpoints.
  std::int64_t steps_done() const { return steps_; }
  void set_steps_done(std::int64_t steps) { steps_ = steps; }

 private:
  LrSchedule rate_;
  std::int64_t steps_ = 0;
};

}  // namespace shardbook::engine
