#include "bench/validate/jobs.h"

#include <functional>
#include <memory>

#include "bench/validate/clusters.h"
#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/trainer.h"
#include "chapters/03_zero_fsdp/trainer.h"
#include "chapters/05_gpipe/trainer.h"
#include "chapters/07_tensor_parallel/trainer.h"
#include "chapters/12_sequence_parallel/trainer.h"
#include "chapters/14_hybrid_3d/trainer.h"
#include "chapters/common/run/worlds.h"
#include "comm/device_mesh.h"
#include "sim/cost_model.h"

namespace shardbook::validate {
namespace {

Options options_of(const Job& job) {
  Options options;
  options.chapter = "validate";
  options.backend = "sim";
  options.cluster = cluster_file(job.cluster);
  options.world_size = job.ranks;
  options.model = job.model.to_json();
  options.data = "random";
  options.dtype = job.dtype;
  options.seq = job.model.is_image() ? 1 : job.seq;
  if (job.model.is_image()) options.image_size = job.image_size;
  options.batch = replicas_of(job) * job.micro_batch * job.micro_batches;
  options.dropout = job.dropout;
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
        finish_rank(as, world, log, {}, report);
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

/// 16-bit parameters have f32 copies, which the optimizer updates.
void keep_masters(const Job& job, shardbook::Strategy& strategy) {
  if (dtype_bytes(job.dtype) == 2) strategy.optimizer().keep_master_copies();
}

Report train_ddp(const Options& options, const Job& job) {
  ddp::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  return train_steps(options, [&](const Options& as, ProcessGroup& world) {
    auto trainer = std::make_unique<ddp::Trainer>(as, how, world);
    set_recompute(*trainer->model().model, job.recompute);
    keep_masters(job, *trainer);
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

Report train_tensor(const Options& options, const Job& job) {
  tensor_parallel::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  how.recompute = job.recompute;
  return train_steps(options, [&](const Options& as, ProcessGroup& world) {
    auto trainer = std::make_unique<tensor_parallel::Trainer>(as, how, world);
    keep_masters(job, *trainer);
    return trainer;
  });
}

Report train_megatron(const Options& options, const Job& job) {
  sequence_parallel::MegatronOptions how;
  how.recompute_attention = job.recompute_attention;
  return train_steps(options, [&](const Options& as, ProcessGroup& world) {
    auto trainer = std::make_unique<sequence_parallel::MegatronTrainer>(
        as, how, job.micro_batches, world);
    keep_masters(job, *trainer);
    return trainer;
  });
}

Report train_sequence(const Options& options, const Job& job) {
  sequence_parallel::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  if (job.strategy == Strategy::kUlysses) {
    how.sequence.kind = sequence_parallel::Kind::kUlysses;
  } else {
    how.sequence.kind = sequence_parallel::Kind::kRsa;
    how.sequence.all_reduce = true;
  }
  return train_steps(
      options,
      [&](const Options& as, ProcessGroup& world) {
        auto trainer =
            std::make_unique<sequence_parallel::Trainer>(as, how, world);
        keep_masters(job, *trainer);
        return trainer;
      },
      sequence_parallel::fold_class(how.sequence));
}

Report train_hybrid(const Options& options, const Job& job) {
  hybrid::HybridOptions how;
  how.tp = job.tp;
  how.pp = job.pp;
  how.micro_batches = job.micro_batches;
  how.recompute = job.recompute ? "always" : "never";
  hybrid::check_legal(options, how);
  return run_chapter(
      options,
      [&](const Options& as, ProcessGroup& world, Report& report) {
        DeviceMesh mesh(world, hybrid::topology_of(how));
        const auto trainer = hybrid::make_trainer(as, how, mesh);
        const TrainingLog log =
            train(as, trainer->optimizer(), world.rank() == 0,
                  [&](std::int64_t step) { return trainer->step(step); });
        finish_rank(as, world, log, {}, report);
      },
      hybrid::fold_class(how));
}

}  // namespace

int replicas_of(const Job& job) {
  switch (job.strategy) {
    case Strategy::kDdp:
    case Strategy::kZero3:
    case Strategy::kFsdp:
      return job.ranks;
    case Strategy::kHybrid:
      return job.ranks / (job.tp * job.pp);
    default:  // all ranks work on the same samples
      return 1;
  }
}

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
    case Strategy::kTensor:
      report = train_tensor(options, job);
      break;
    case Strategy::kMegatron:
      report = train_megatron(options, job);
      break;
    case Strategy::kUlysses:
    case Strategy::kRsa:
      report = train_sequence(options, job);
      break;
    case Strategy::kHybrid:
      report = train_hybrid(options, job);
      break;
  }
  return {report.time.step_s, report.time.trust};
}

}  // namespace shardbook::validate
