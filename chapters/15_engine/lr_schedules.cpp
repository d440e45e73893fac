#include "chapters/15_engine/lr_schedules.h"

#include <algorithm>
#include <cmath>

namespace shardbook::engine {

double warmup_lr(const WarmupOptions& options, std::int64_t it) {
  const std::int64_t n = std::max<std::int64_t>(2, options.num_steps);
  double gamma = 1;
  if (it < 0) {
    gamma = 0;
  } else if (it < n) {
    const double done = static_cast<double>(it), all = static_cast<double>(n);
    gamma = options.is_log ? std::log(done + 1) / std::log(all) : done / all;
  } else if (options.total_steps > 0) {
    const std::int64_t total = options.total_steps;
    gamma = std::max(
        0.0, static_cast<double>(total - it) /
                 static_cast<double>(std::max<std::int64_t>(1, total - n)));
  }
  return options.min_lr + (options.max_lr - options.min_lr) * gamma;
}

LrSchedule warmup_schedule(const WarmupOptions& options) {
  return [options](std::int64_t step) { return warmup_lr(options, step - 1); };
}

}  // namespace shardbook::engine
