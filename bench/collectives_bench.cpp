// Collectives against the memory of the machine.
//
//   collectives_bench --benchmark_filter=AllReduce
//
// One row is one operation, on thread ranks or on processes over Gloo. Its time
// is the median over calls, on rank 0, each after a barrier. "of_memory" is the
// traffic that the operation cannot avoid among ranks that share memory (every
// buffer read once and written once) divided by the bytes that all cores
// together copy in that time. Their bandwidth is measured first, in this
// process. The ratio may exceed 1 while buffers fit a cache. The rows `by_*`
// are the algorithms written on send and recv.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "comm/gloo/gloo_group.h"
#include "comm/internal/rank_device.h"
#include "comm/launch.h"
#include "comm/processes.h"

namespace shardbook {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Bytes read plus written per second when every core copies.
double measure_bandwidth() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const int cores = internal::available_cores();
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::vector<std::thread> threads;
    std::vector<double> rates(static_cast<std::size_t>(cores));
    for (int t = 0; t < cores; ++t) {
      threads.emplace_back([&rates, t] {
        std::vector<char> from(kBytes, 1);
        std::vector<char> to(kBytes, 2);
        const Clock::time_point begin = Clock::now();
        std::memcpy(to.data(), from.data(), kBytes);
        benchmark::DoNotOptimize(to.data());
        rates[static_cast<std::size_t>(t)] =
            2.0 * kBytes / seconds_since(begin);
      });
    }
    for (std::thread& thread : threads) thread.join();
    double sum = 0;
    for (double rate : rates) sum += rate;
    best = std::max(best, sum);
  }
  return best;
}

double bandwidth() {
  static const double value = measure_bandwidth();
  return value;
}

/// One call of a rank. `Prepare` makes its buffers and returns it.
using Operation = std::function<void()>;
using Prepare = std::function<Operation(ProcessGroup&, std::int64_t)>;

// Median seconds of one call on rank 0; every rank runs this.
std::string time_calls(ProcessGroup& world, const Operation& operation) {
  std::vector<double> times;
  const Clock::time_point begin = Clock::now();
  for (bool more = true; more;) {
    for (int i = 0; i < 5; ++i) {
      world.barrier();
      const Clock::time_point start = Clock::now();
      operation();
      times.push_back(seconds_since(start));
    }
    // Rank 0 decides for all when it is enough.
    more = world.exchange(seconds_since(begin) < 0.6 ? "more" : "enough")[0] ==
           "more";
  }
  std::sort(times.begin(), times.end());
  return std::to_string(times[times.size() / 2] * 1e9);
}

double measure_seconds(const std::string& backend, int world_size,
                       std::int64_t bytes, const Prepare& prepare) {
  const auto body = [&](ProcessGroup& world) {
    const Operation operation = prepare(world, bytes / 4);
    operation();
    return time_calls(world, operation);
  };
  std::string nanoseconds;
  if (backend == "gloo") {
    nanoseconds = run_processes(world_size, body)[0];
  } else {
    run_ranks(world_size, [&](ProcessGroup& world) {
      const std::string mine = body(world);
      if (world.rank() == 0) nanoseconds = mine;
    });
  }
  return std::stod(nanoseconds) * 1e-9;
}

struct Row {
  std::string name;
  /// Buffers of the given size that are read and written, all ranks together.
  std::function<double(int)> buffers;
  Prepare prepare;
};

std::vector<Row> rows() {
  const auto all_reduce_traffic = [](int p) { return 2.0 * p; };
  const auto all_reduce_by = [&](const std::string& name, auto algorithm) {
    return Row{"AllReduce/by_" + name, all_reduce_traffic,
               [algorithm](ProcessGroup& world, std::int64_t n) -> Operation {
                 const Tensor x = Tensor::zeros({n});
                 return [&world, x, algorithm] { algorithm(world, x); };
               }};
  };
  return {
      {"AllReduce", all_reduce_traffic,
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         return [&world, x] { world.all_reduce(x).wait(); };
       }},
      {"ReduceScatter", [](int p) { return p + 1.0; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         const Tensor y = Tensor::zeros({n / world.size()});
         return [&world, x, y] { world.reduce_scatter(y, x).wait(); };
       }},
      {"AllGather", [](int p) { return p + 1.0; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n / world.size()});
         const Tensor y = Tensor::zeros({n});
         return [&world, x, y] { world.all_gather(y, x).wait(); };
       }},
      {"Broadcast", [](int p) { return 1.0 * p; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         return [&world, x] { world.broadcast(x, 0).wait(); };
       }},
      {"Reduce", [](int p) { return p + 1.0; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         return [&world, x] { world.reduce(x, 0).wait(); };
       }},
      {"Gather", [](int) { return 2.0; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n / world.size()});
         const Tensor y = Tensor::zeros({n});
         return [&world, x, y] { world.gather(y, x, 0).wait(); };
       }},
      {"Scatter", [](int) { return 2.0; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         const Tensor y = Tensor::zeros({n / world.size()});
         return [&world, x, y] { world.scatter(y, x, 0).wait(); };
       }},
      {"AllToAll", [](int p) { return 2.0 * p; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         const Tensor y = Tensor::zeros({n});
         return [&world, x, y] { world.all_to_all(y, x).wait(); };
       }},
      {"SendRecv", [](int p) { return 2.0 * p; },
       [](ProcessGroup& world, std::int64_t n) -> Operation {
         const Tensor x = Tensor::zeros({n});
         const Tensor y = Tensor::zeros({n});
         const int p = world.size();
         return [&world, x, y, p] {
           Work received = world.recv(y, (world.rank() + p - 1) % p);
           Work sent = world.send(x, (world.rank() + 1) % p);
           received.wait();
           sent.wait();
         };
       }},
      all_reduce_by("ring",
                    [](ProcessGroup& world, const Tensor& x) {
                      algorithms::ring_all_reduce(world, x);
                    }),
      all_reduce_by("halving_doubling",
                    [](ProcessGroup& world, const Tensor& x) {
                      algorithms::halving_doubling_all_reduce(world, x);
                    }),
      all_reduce_by("double_tree",
                    [](ProcessGroup& world, const Tensor& x) {
                      algorithms::double_tree_all_reduce(world, x);
                    }),
  };
}

std::string size_text(std::int64_t bytes) {
  return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + "MiB"
                          : std::to_string(bytes >> 10) + "KiB";
}

void add_benchmarks(const std::string& backend) {
  for (const Row& row : rows()) {
    for (int world_size : {2, 4}) {
      for (std::int64_t bytes :
           {1LL << 10, 64LL << 10, 1LL << 20, 64LL << 20}) {
        const std::string name = row.name + "/" + backend + "/" +
                                 std::to_string(world_size) + "ranks/" +
                                 size_text(bytes);
        benchmark::RegisterBenchmark(
            name.c_str(),
            [=](benchmark::State& state) {
              for (auto _ : state) {
                const double seconds =
                    measure_seconds(backend, world_size, bytes, row.prepare);
                state.SetIterationTime(seconds);
                const double traffic =
                    row.buffers(world_size) * static_cast<double>(bytes);
                state.counters["GB/s"] =
                    static_cast<double>(bytes) / seconds * 1e-9;
                state.counters["of_memory"] = traffic / seconds / bandwidth();
              }
            })
            ->Iterations(1)
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

}  // namespace
}  // namespace shardbook

int main(int argc, char** argv) {
  shardbook::add_benchmarks("threads");
  if (shardbook::internal::has_gloo()) shardbook::add_benchmarks("gloo");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("memory_GB/s",
                              std::to_string(shardbook::bandwidth() * 1e-9));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
