#include "bench/validate/jobs.h"

#include <algorithm>
#include <map>

#include "chapters/00_single_device/single_device.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/planner/on_shapes.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "sim/virtual_clock.h"

namespace shardbook::validate {
namespace {

std::map<std::string, std::string>& replaced() {
  static std::map<std::string, std::string> files;
  return files;
}

/// The file that replaces a preset, with the same software.
std::string cluster_file(const std::string& name) {
  const std::size_t plus = std::min(name.rfind('+'), name.size());
  const auto found = replaced().find(name.substr(0, plus));
  return found == replaced().end() ? name : found->second + name.substr(plus);
}

bool recomputes(const HybridJob& job) {
  return job.layout.recompute == Recompute::kBlocks;
}

/// A step of a chapter's strategy, with its options.
template <typename StrategyType, typename... Setups>
StepTime step_of(const Options& options, bool keeps_masters,
                 const FoldClass& fold_class, const Setups&... setups) {
  const Report report = planner::train_on_shapes(
      options, fold_class,
      [&](const Options& options, ProcessGroup& world, Run& run) {
        StrategyType strategy(options, setups..., world);
        if (keeps_masters && dtype_bytes(options.dtype) == 2) {
          strategy.optimizer().keep_master_copies();
        }
        run.train(options, strategy);
      });
  return {report.time.step_s, report.time.trust};
}

/// Its strategy knows no world.
struct OneDevice : single_device::SingleDevice {
  OneDevice(const Options& options,
            const single_device::SingleDeviceOptions& setup, ProcessGroup&)
      : SingleDevice(options, setup) {}
};

}  // namespace

HybridJob gpt_job(const Row& row, int vocabulary) {
  HybridJob job;
  job.sizes.vocabulary =
      vocabulary > 0 ? vocabulary : row.count("vocab", kMaxSize);
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count("seq", kMaxSize);
  job.layers = row.count("layers", kMaxLayers);
  SB_CHECK(job.sizes.hidden % job.sizes.heads == 0, row.place(), ": hidden is ",
           job.sizes.hidden, ", which is no multiple of ", job.sizes.heads,
           " heads");
  return job;
}

bool is_set(const Row& row, const char* column) {
  return row.has(column) && row.flag(column);
}

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
  single_device::SingleDeviceOptions setup;
  setup.num_micro_batches = job.micro_batches;
  setup.recompute = recomputes(job);
  setup.master_weights = dtype_bytes(job.layout.dtype) == 2;
  return step_of<OneDevice>(options_of(job), false, one_class, setup);
}

StepTime with_zero3(const HybridJob& job, bool is_of_2021) {
  zero_fsdp::StrategyOptions setup;
  setup.strategy = "zero3";
  setup.micro_batches = job.micro_batches;
  setup.recompute = recomputes(job);
  setup.zero = zero::ZeroOptions{};  // DeepSpeed's defaults
  if (is_of_2021) {
    setup.zero.unit_types.clear();
    setup.zero.prefetch_bucket_size = 0;
    setup.zero.overlap_comm = false;
  }
  return step_of<zero_fsdp::ZeroFsdpStrategy>(options_of(job), false, one_class,
                                              setup);
}

StepTime with_gpipe(const HybridJob& job, const Options& options,
                    const std::string& checkpoint) {
  gpipe::StrategyOptions setup;
  setup.micro_batches = job.micro_batches;
  setup.recompute = checkpoint;
  setup.partition = "time";
  return step_of<gpipe::GpipeStrategy>(options, false, each_rank, setup);
}

StepTime with_megatron(const HybridJob& job) {
  return step_of<sequence_parallel::MegatronStrategy>(
      options_of(job), true, one_class, sequence_parallel::MegatronOptions(),
      job.micro_batches);
}

StepTime with_sequence(const HybridJob& job, sequence_parallel::Kind kind) {
  sequence_parallel::StrategyOptions setup;
  setup.micro_batches = job.micro_batches;
  setup.sequence.kind = kind;
  setup.sequence.all_reduce = kind == sequence_parallel::Kind::kRsa;
  return step_of<sequence_parallel::SequenceStrategy>(
      options_of(job), true, sequence_parallel::fold_class(setup), setup);
}

StepTime run_attention(const AttentionJob& job) {
  StepTime time;
  const auto body = [&](ProcessGroup& cp) {
    sequence_parallel::RingOptions options;
    options.attention.heads = job.heads;
    options.attention.kv_heads = job.kv_heads;
    options.layout = job.layout;
    const auto tensor = [&](std::int64_t heads) {
      return Tensor::zeros({1, job.tokens_per_rank, heads * job.head_dim},
                           {job.dtype, Device()});
    };
    const Tensors qkv = {tensor(job.heads), tensor(job.kv_heads),
                         tensor(job.kv_heads)};
    for (const Tensor& each : qkv) {
      if (job.with_backward) each.set_requires_grad();
    }
    const Tensor dout = tensor(job.heads);
    sim::VirtualClock& clock = *sim::VirtualClock::current();
    clock.begin_steps();
    const Tensor out =
        sequence_parallel::ring_attention(qkv[0], qkv[1], qkv[2], options, cp);
    if (job.with_backward) {
      const PhaseScope phase(Phase::kBackward);
      autograd::backward({out}, {dout});
    }
    // Ranks take turns on one thread
    time.seconds = std::max(time.seconds, clock.now_s());
    time.trust = std::max(time.trust, clock.trust());
  };
  planner::on_shapes(job.cluster, job.ranks, each_rank, body);
  return time;
}

}  // namespace shardbook::validate
