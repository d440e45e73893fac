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
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/timing.h"
#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "comm/gloo/gloo_group.h"
#include "comm/internal/rank_device.h"
#include "comm/launch.h"
#include "comm/processes.h"

namespace shardbook {
namespace {

using bench::now_s;
using bench::seconds_of;

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
        const double seconds = seconds_of([&] {
          std::memcpy(to.data(), from.data(), kBytes);
          benchmark::DoNotOptimize(to.data());
        });
        rates[static_cast<std::size_t>(t)] = 2.0 * kBytes / seconds;
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

/// One call of a rank on two buffers.
using Operation =
    std::function<void(ProcessGroup& world, const Tensor& x, const Tensor& y)>;

struct Row {
  std::string name;
  /// How many buffers of the given size each rank reads and writes, and how many
  /// more all ranks together.
  double buffers_each, buffers_shared;
  Operation call;
  /// Whether x (y) holds one rank's part, not the whole size.
  bool x_is_part = false, y_is_part = false;
};

// Median seconds of one call on rank 0; every rank runs this.
std::string time_calls(ProcessGroup& world,
                       const std::function<void()>& operation) {
  std::vector<double> times;
  const double begin_s = now_s();
  for (bool more = true; more;) {
    for (int i = 0; i < 5; ++i) {
      world.barrier();
      times.push_back(seconds_of(operation));
    }
    // Rank 0 decides for all ranks when to stop.
    more = world.exchange(now_s() - begin_s < 0.6 ? "more" : "enough")[0] ==
           "more";
  }
  return std::to_string(bench::median(times) * 1e9);
}

double measure_seconds(const std::string& backend, int world_size,
                       std::int64_t bytes, const Row& row) {
  const auto body = [&](ProcessGroup& world) {
    const auto buffer = [&](bool is_part) {
      return Tensor::zeros({bytes / 4 / (is_part ? world.size() : 1)});
    };
    const Tensor x = buffer(row.x_is_part), y = buffer(row.y_is_part);
    row.call(world, x, y);
    return time_calls(world, [&] { row.call(world, x, y); });
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

std::vector<Row> rows() {
  using G = ProcessGroup;
  using T = const Tensor;
  constexpr bool kPart = true;
  return {
      {"AllReduce", 2, 0,
       [](G& world, T& x, T&) { world.all_reduce(x).wait(); }},
      {"ReduceScatter", 1, 1,
       [](G& world, T& x, T& y) { world.reduce_scatter(y, x).wait(); }, !kPart,
       kPart},
      {"AllGather", 1, 1,
       [](G& world, T& x, T& y) { world.all_gather(y, x).wait(); }, kPart},
      {"Broadcast", 1, 0,
       [](G& world, T& x, T&) { world.broadcast(x, 0).wait(); }},
      {"Reduce", 1, 1, [](G& world, T& x, T&) { world.reduce(x, 0).wait(); }},
      {"Gather", 0, 2,
       [](G& world, T& x, T& y) { world.gather(y, x, 0).wait(); }, kPart},
      {"Scatter", 0, 2,
       [](G& world, T& x, T& y) { world.scatter(y, x, 0).wait(); }, !kPart,
       kPart},
      {"AllToAll", 2, 0,
       [](G& world, T& x, T& y) { world.all_to_all(y, x).wait(); }},
      {"SendRecv", 2, 0,
       [](G& world, T& x, T& y) {
         const int p = world.size();
         Work received = world.recv(y, (world.rank() + p - 1) % p);
         Work sent = world.send(x, (world.rank() + 1) % p);
         received.wait();
         sent.wait();
       }},
      {"AllReduce/by_ring", 2, 0,
       [](G& world, T& x, T&) { algorithms::ring_all_reduce(world, x); }},
      {"AllReduce/by_halving_doubling", 2, 0,
       [](G& world, T& x, T&) {
         algorithms::halving_doubling_all_reduce(world, x);
       }},
      {"AllReduce/by_double_tree", 2, 0,
       [](G& world, T& x, T&) {
         algorithms::double_tree_all_reduce(world, x);
       }},
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
                    measure_seconds(backend, world_size, bytes, row);
                state.SetIterationTime(seconds);
                const double rate = static_cast<double>(bytes) / seconds;
                state.counters["GB/s"] = rate * 1e-9;
                state.counters["of_memory"] =
                    (row.buffers_each * world_size + row.buffers_shared) *
                    rate / bandwidth();
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
}
