// How long a simulation takes: three steps of DDP on gpt-nano, by number of
// ranks, with every rank run, or with identical ranks run once.
//
//   sim_bench --benchmark_filter=Unfolded

#include <benchmark/benchmark.h>

#include "bench/narrow_console.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/common/run/worlds.h"

namespace shardbook {
namespace {

void simulate(benchmark::State& state, bool folds) {
  Options options;
  options.backend = "sim";
  options.cluster = "selene";
  options.data = "random";
  options.world_size = static_cast<int>(state.range(0));
  options.batch = options.world_size;
  options.steps = 3;
  options.fold = folds;
  double step_s = 0;
  for (auto _ : state) {
    const Report report = run_chapter(
        options,
        [](const Options& options, ProcessGroup& world, Report& result) {
          ddp::DdpStrategy strategy(options, {}, world);
          const TrainingLog log =
              train(options, strategy.optimizer(), false,
                    [&](std::int64_t step) { return strategy.step(step); });
          finish_rank(options, world, log, strategy.bills()[0], result);
        });
    step_s = report.time.step_s;
  }
  state.counters["virtual_step_ms"] = step_s * 1e3;
}

void BM_Unfolded(benchmark::State& state) { simulate(state, false); }
void BM_Folded(benchmark::State& state) { simulate(state, true); }

BENCHMARK(BM_Unfolded)
    ->RangeMultiplier(4)
    ->Range(4, 4096)
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Folded)->RangeMultiplier(4)->Range(4, 4096)->Unit(
    benchmark::kMillisecond);

}  // namespace
}  // namespace shardbook

int main(int argc, char** argv) {
  return shardbook::bench::run_benchmarks(argc, argv, [] {});
}
