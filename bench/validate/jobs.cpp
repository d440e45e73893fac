#include "bench/validate/jobs.h"

#include <functional>
#include <map>

#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/trainer.h"
#include "chapters/03_zero_fsdp/trainer.h"
#include "chapters/05_gpipe/trainer.h"
#include "chapters/07_tensor_parallel/trainer.h"
#include "chapters/12_sequence_parallel/trainer.h"
#include "chapters/planner/on_shapes.h"

namespace shardbook::validate {
namespace {

std::map<std::string, std::string>& replaced() {
  static std::map<std::string, std::string> files;
  return files;
}

std::string cluster_file(const std::string& name) {
  const auto found = replaced().find(name);
  return found == replaced().end() ? name : found->second;
}

bool recomputes(const HybridJob& job) {
  return job.layout.recompute == Recompute::kBlocks;
}

using Rank =
    std::function<void(const Options& options, ProcessGroup& world, Run& run)>;

StepTime step_of(const Options& options, const Rank& rank,
                 const FoldClass& fold_class = one_class) {
  const Report report = planner::train_on_shapes(options, fold_class, rank);
  return {report.time.step_s, report.time.trust};
}

void keep_masters(const Options& options, Strategy& strategy) {
  if (dtype_bytes(options.dtype) == 2) {
    strategy.optimizer().keep_master_copies();
  }
}

/// Of a chapter's trainer, with its options.
template <typename Trainer, typename... How>
StepTime step_of_trainer(const Options& options, bool keeps_masters,
                         const FoldClass& fold_class, const How&... how) {
  return step_of(
      options,
      [&](const Options& as, ProcessGroup& world, Run& run) {
        Trainer trainer(as, how..., world);
        if (keeps_masters) keep_masters(as, trainer);
        run.train(as, trainer);
      },
      fold_class);
}

}  // namespace

void replace_cluster(const std::string& name, const std::string& file) {
  replaced()[name] = file;
}

sim::Cluster cluster_named(const std::string& name) {
  sim::Cluster cluster = sim::Cluster::read(cluster_file(name));
  cluster.name = name;
  return cluster;
}

Options options_of(const HybridJob& job) {
  Options options = planner::shape_options();
  options.cluster = cluster_file(job.cluster.name);
  options.world_size = job.ranks();
  options.model = planner::gpt_of(job.sizes, job.layers).to_json();
  options.dtype = job.layout.dtype;
  options.seq = job.sizes.seq;
  options.batch = job.dp * job.layout.micro_batch * job.micro_batches;
  options.dropout = job.layout.dropout;
  return options;
}

StepTime on_one_device(const HybridJob& job) {
  single_device::SingleDeviceOptions how;
  how.num_micro_batches = job.micro_batches;
  how.recompute = recomputes(job);
  how.master_weights = dtype_bytes(job.layout.dtype) == 2;
  return step_of(options_of(job),
                 [&](const Options& as, ProcessGroup&, Run& run) {
                   single_device::SingleDevice strategy(as, how);
                   run.train(as, strategy);
                 });
}

StepTime with_ddp(const HybridJob& job) {
  ddp::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  return step_of(options_of(job),
                 [&](const Options& as, ProcessGroup& world, Run& run) {
                   ddp::Trainer trainer(as, how, world);
                   set_recompute(*trainer.model().model, recomputes(job));
                   keep_masters(as, trainer);
                   run.train(as, trainer);
                 });
}

StepTime with_zero3(const HybridJob& job, bool is_of_2021) {
  zero_fsdp::TrainerOptions how;
  how.strategy = "zero3";
  how.micro_batches = job.micro_batches;
  how.recompute = recomputes(job);
  how.zero = zero::ZeroOptions{};  // DeepSpeed's defaults
  if (is_of_2021) {
    how.zero.unit_types.clear();
    how.zero.prefetch_bucket_size = 0;
    how.zero.overlap_comm = false;
  }
  return step_of_trainer<zero_fsdp::Trainer>(options_of(job), false, one_class,
                                             how);
}

StepTime with_fsdp(const HybridJob& job) {
  zero_fsdp::TrainerOptions how;
  how.strategy = "fsdp";
  how.micro_batches = job.micro_batches;
  how.recompute = recomputes(job);
  how.param_dtype = how.reduce_dtype = dtype_name(job.layout.dtype);
  Options options = options_of(job);
  options.dtype = DType::kF32;  // of the shards
  return step_of_trainer<zero_fsdp::Trainer>(options, false, one_class, how);
}

StepTime with_gpipe(const HybridJob& job, const Options& options,
                    const std::string& checkpoint) {
  gpipe::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  how.recompute = checkpoint;
  how.partition = "time";
  return step_of_trainer<gpipe::Trainer>(
      options, false, [](int rank) { return rank; }, how);
}

StepTime with_tensor(const HybridJob& job) {
  tensor_parallel::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  how.recompute = recomputes(job);
  return step_of_trainer<tensor_parallel::Trainer>(options_of(job), true,
                                                   one_class, how);
}

StepTime with_megatron(const HybridJob& job) {
  return step_of_trainer<sequence_parallel::MegatronTrainer>(
      options_of(job), true, one_class, sequence_parallel::MegatronOptions(),
      job.micro_batches);
}

StepTime with_sequence(const HybridJob& job, sequence_parallel::Kind kind) {
  sequence_parallel::TrainerOptions how;
  how.micro_batches = job.micro_batches;
  how.sequence.kind = kind;
  how.sequence.all_reduce = kind == sequence_parallel::Kind::kRsa;
  return step_of_trainer<sequence_parallel::Trainer>(
      options_of(job), true, sequence_parallel::fold_class(how.sequence), how);
}

}  // namespace shardbook::validate
