#include "bench/validate/jobs.h"

#include <functional>
#include <memory>

#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/trainer.h"
#include "chapters/03_zero_fsdp/trainer.h"
#include "chapters/05_gpipe/trainer.h"
#include "chapters/common/run/worlds.h"
#include "sim/cost_model.h"

namespace shardbook::validate {
namespace {

Options options_of(const Job& job) {
  Options options;
  options.chapter = "validate";
  options.backend = "sim";
  options.cluster = job.cluster;
  options.world_size = job.ranks;
  options.model = job.model.to_json();
  options.data = "random";
  options.dtype = job.dtype;
  options.seq = job.model.is_image() ? 1 : job.seq;
  if (job.model.is_image()) options.image_size = job.image_size;
  // Stages of a pipeline work on the same samples
  const int replicas = job.strategy == Strategy::kGPipe ? 1 : job.ranks;
  options.batch = replicas * job.micro_batch * job.micro_batches;
  options.steps = 2;
  options.check = false;
  return options;
}

/// The strategy of one rank.
using Make = std::function<std::unique_ptr<shardbook::Strategy>(
    const Options& options, ProcessGroup& world)>;

Report train_steps(const Options& options, const Make& make,
                   const FoldClass& fold_class = one_class) {
  return run_chapter(
      options,
      [&](const Options& as, ProcessGroup& world, Report& report) {
        const std::unique_ptr<shardbook::Strategy> strategy = make(as, world);
        const TrainingLog log =
            train(as, strategy->optimizer(), world.rank() == 0,
                  [&](std::int64_t step) { return strategy->step(step); });
        finish_rank(as, world, log, 0, MemoryBill(), report);
      },
      fold_class);
}

Report train_one_device(const Options& options, const Job& job) {
  single_device::SingleDeviceOptions how;
  how.num_micro_batches = job.micro_batches;
  how.recompute = job.recompute;
  how.master_weights = dtype_bytes(job.dtype) == 2;
  return train_steps(options, [&](const Options& as, ProcessGroup&) {
    return std::make_unique<single_device::SingleDevice>(as, how);
  });
}

Report train_ddp(const Options& options, const Job& job) {
  ddp::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  return train_steps(options, [&](const Options& as, ProcessGroup& world) {
    auto trainer = std::make_unique<ddp::Trainer>(as, how, world);
    set_recompute(*trainer->model().model, job.recompute);
    if (dtype_bytes(job.dtype) == 2) trainer->optimizer().keep_master_copies();
    return trainer;
  });
}

Report train_sharded(Options options, const Job& job) {
  zero_fsdp::TrainerOptions how;
  how.zero = zero::ZeroOptions{};  // DeepSpeed's defaults
  how.micro_batches = job.micro_batches;
  how.recompute = job.recompute;
  how.strategy = job.strategy == Strategy::kZero3 ? "zero3" : "fsdp";
  if (job.is_deepspeed_of_2021) {
    how.zero.unit_types.clear();
    how.zero.prefetch_bucket_size = 0;
    how.zero.overlap_comm = false;
  }
  if (job.strategy == Strategy::kFsdp) {
    options.dtype = DType::kF32;  // of the shards
    how.param_dtype = how.reduce_dtype = dtype_name(job.dtype);
  }
  return train_steps(options, [&](const Options& as, ProcessGroup& world) {
    return std::make_unique<zero_fsdp::Trainer>(as, how, world);
  });
}

Report train_gpipe(const Options& options, const Job& job) {
  gpipe::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  how.recompute = job.checkpoint;
  how.partition = "time";
  return train_steps(
      options,
      [&](const Options& as, ProcessGroup& world) {
        return std::make_unique<gpipe::Trainer>(as, how, world);
      },
      [](int rank) { return rank; });
}

}  // namespace

StepTime step_time(const Job& job) {
  const Options options = options_of(job);
  Report report;
  switch (job.strategy) {
    case Strategy::kOneDevice:
      report = train_one_device(options, job);
      break;
    case Strategy::kDdp:
      report = train_ddp(options, job);
      break;
    case Strategy::kZero3:
    case Strategy::kFsdp:
      report = train_sharded(options, job);
      break;
    case Strategy::kGPipe:
      report = train_gpipe(options, job);
      break;
  }
  return {report.time.step_s, report.time.trust};
}

}  // namespace shardbook::validate
