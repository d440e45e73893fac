#pragma once

// What Google Benchmark's programs print: a line of 80 columns per benchmark.

#include <benchmark/benchmark.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

namespace shardbook::bench {

/// A name, the time of one iteration, and counters.
class NarrowConsole : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    PrintBasicContext(&std::cerr, context);
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    constexpr int kNameColumns = 38;
    for (const Run& run : runs) {
      std::string name = run.run_name.function_name;
      if (!run.run_name.args.empty()) name += "/" + run.run_name.args;
      if (name.size() > kNameColumns) {
        std::printf("%s\n", name.c_str());
        name.clear();
      }
      std::printf("%-*s", kNameColumns, name.c_str());
      print_time(run);
      for (const auto& [counter, value] : run.counters) {
        std::printf("  %s %.3g", counter.c_str(), value.value);
      }
      std::printf("\n");
    }
    std::fflush(stdout);
  }

 private:
  static void print_time(const Run& run) {
    // Without a clock of its own, a benchmark is timed by its processor time
    const double time = run.run_name.time_type.empty()
                            ? run.GetAdjustedCPUTime()
                            : run.GetAdjustedRealTime();
    double value = 1e9 * time / benchmark::GetTimeUnitMultiplier(run.time_unit);
    const char* unit = "ns";
    for (const char* larger : {"us", "ms", "s"}) {
      if (value < 1000) break;
      value /= 1000;
      unit = larger;
    }
    std::printf("%8.4g %-2s", value, unit);
  }
};

/// The rest of main, and its exit status. `prepare` registers benchmarks, or names
/// what was measured before them.
template <typename Prepare>
int run_benchmarks(int argc, char** argv, const Prepare& prepare) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  prepare();
  NarrowConsole console;
  benchmark::RunSpecifiedBenchmarks(&console);
  benchmark::Shutdown();
  return 0;
}

}  // namespace shardbook::bench
