#pragma once

// Runs that figures draw: on shapes, in virtual time.

#include <cstdint>
#include <string>

#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/common/run/program.h"
#include "sim/timeline_step.h"

namespace shardbook::figures {

/// Three steps on shapes, as ./shardbook run does them with --backend sim and
/// --data random.
Options on_shapes(const std::string& cluster, int world_size,
                  const std::string& model, std::int64_t batch,
                  std::int64_t seq);

/// The chapters' trainings, without their programs.
Report run_one_device(const Options& options,
                      const single_device::SingleDeviceOptions& setup = {});
Report run_ddp(const Options& options, const ddp::StrategyOptions& setup = {});
Report run_sharded(const Options& options,
                   const zero_fsdp::StrategyOptions& setup);
/// By a schedule of the 1F1B chapter: "gpipe", "1f1b", "zb-h1".
Report run_pipeline(const Options& options, const std::string& schedule,
                    std::int64_t micro_batches);
Report run_pipeline(const Options& options,
                    const pipeline::StrategyOptions& setup);
Report run_tensor_parallel(const Options& options);
Report run_sequence(const Options& options,
                    const sequence_parallel::StrategyOptions& setup);

/// The last step of the first rank. Times count from its begin.
sim::RankTimeline first_rank(const Report& report);

}  // namespace shardbook::figures
