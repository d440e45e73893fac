// How long a simulation takes: three steps of DDP on gpt-nano, by number of
// ranks, with every rank run, or with identical ranks run once.
//
//   sim_bench --benchmark_filter=Unfolded

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "bench/narrow_console.h"
#include "chapters/02_ddp/program.h"

namespace shardbook {
namespace {

void simulate(benchmark::State& state, const char* fold) {
  const std::string line = fmt::format(
      "ch02_ddp --backend sim --cluster selene --data random --steps 3 "
      "--world-size {0} --batch {0} {1}",
      state.range(0), fold);
  double step_s = 0;
  for (auto _ : state) step_s = run_line(ddp::program, line).time.step_s;
  state.counters["virtual_step_ms"] = step_s * 1e3;
}

void BM_Unfolded(benchmark::State& state) { simulate(state, "--no-fold"); }
void BM_Folded(benchmark::State& state) { simulate(state, "--fold"); }

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
