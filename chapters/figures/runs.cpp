#include "chapters/figures/runs.h"

#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"

namespace shardbook::figures {

Options on_shapes(const std::string& cluster, int world_size,
                  const std::string& model, std::int64_t batch,
                  std::int64_t seq) {
  Options options;
  options.chapter = "figures";
  options.backend = "sim";
  options.cluster = cluster;
  options.world_size = world_size;
  options.model = model;
  options.data = "random";
  options.batch = batch;
  options.seq = seq;
  options.steps = 3;
  options.check = false;
  return options;
}

namespace {

// `make` gives each rank its strategy.
template <typename Make>
Report run_on_ranks(const Options& options, const Make& make,
                    const FoldClass& fold_class = one_class) {
  ChapterRun chapter;
  chapter.fold_class = fold_class;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    auto strategy = make(options, world);
    run.train(options, strategy);
  };
  return run_and_compare(options, chapter);
}

}  // namespace

Report run_one_device(const Options& options,
                      const single_device::SingleDeviceOptions& setup) {
  return run_on_ranks(options, [&](const Options& options, ProcessGroup&) {
    return single_device::SingleDevice(options, setup);
  });
}

Report run_ddp(const Options& options, const ddp::StrategyOptions& setup) {
  return run_on_ranks(options, [&](const Options& options, ProcessGroup& dp) {
    return ddp::DdpStrategy(options, setup, dp);
  });
}

Report run_sharded(const Options& options,
                   const zero_fsdp::StrategyOptions& setup) {
  return run_on_ranks(options, [&](const Options& options, ProcessGroup& dp) {
    return zero_fsdp::ZeroFsdpStrategy(options, setup, dp);
  });
}

Report run_pipeline(const Options& options, const std::string& schedule,
                    std::int64_t micro_batches) {
  pipeline::StrategyOptions setup;
  setup.schedule = schedule;
  setup.micro_batches = micro_batches;
  return run_pipeline(options, setup);
}

Report run_pipeline(const Options& options,
                    const pipeline::StrategyOptions& setup) {
  const pipeline::Plan plan = pipeline::make_plan(options, setup);
  return run_on_ranks(
      options,
      [&](const Options& options, ProcessGroup& pp) {
        return pipeline::PipelineStrategy(options, setup, plan, pp);
      },
      each_rank);
}

Report run_tensor_parallel(const Options& options) {
  return run_on_ranks(options, [](const Options& options, ProcessGroup& tp) {
    return tensor_parallel::TensorParallelStrategy(options, {}, tp);
  });
}

Report run_sequence(const Options& options,
                    const sequence_parallel::StrategyOptions& setup) {
  return run_on_ranks(
      options,
      [&](const Options& options, ProcessGroup& cp) {
        return sequence_parallel::SequenceStrategy(options, setup, cp);
      },
      sequence_parallel::fold_class(setup));
}

sim::RankTimeline first_rank(const Report& report) {
  return sim::last_step(report.timelines).groups.at(0).timeline;
}

}  // namespace shardbook::figures
