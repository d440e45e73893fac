// Kernels against the machine: matrix products as a share of the peak of one
// core's multiply-add units, everything else as a share of memory bandwidth.
//
//   kernels_bench --benchmark_filter=Matmul
//
// The peak and the bandwidth are measured first, in this process. "of_peak" and
// "of_memory" are ratios; the latter may exceed 1 while data fits a cache.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <random>
#include <string>
#include <vector>
#include <xsimd/xsimd.hpp>

#ifdef SHARDBOOK_HAVE_OPENMP
#include <omp.h>
#endif

#include "core/kernels/attention.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/embedding.h"
#include "core/kernels/layout.h"
#include "core/kernels/matmul.h"
#include "core/kernels/norm.h"
#include "core/kernels/optimizer.h"
#include "core/kernels/random.h"
#include "core/kernels/reduce.h"
#include "core/kernels/softmax.h"

namespace shardbook::kernels {
namespace {

// CPU time of this thread: a busy neighbour costs less of it than of wall time.
double seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * time.tv_nsec;
}

// Independent chains of fused multiply-adds: more than latency times units.
double measure_peak_flops() {
  using V = xsimd::batch<float>;
  constexpr int kChains = V::size == 16 ? 24 : 12;
  constexpr std::int64_t kSteps = 4000000;
  double best = 0.0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    V chains[kChains];
    for (V& chain : chains) chain = V(1e-3f);
    const V factor(0.999f);
    const double start = seconds();
    for (std::int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 24
      for (int j = 0; j < kChains; ++j) {
        chains[j] = xsimd::fma(chains[j], factor, factor);
      }
    }
    const double elapsed = seconds() - start;
    for (V& chain : chains) benchmark::DoNotOptimize(chain);
    best = std::max(best, 2.0 * kChains * V::size * kSteps / elapsed);
  }
  return best;
}

// The triad a = b + s c on arrays that fit no cache; 12 bytes an element.
double measure_bandwidth() {
  constexpr std::int64_t kSize = std::int64_t{1} << 25;
  std::vector<float> a(kSize, 0.0f), b(kSize, 1.0f), c(kSize, 2.0f);
  double best = 0.0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double start = seconds();
    for (std::int64_t i = 0; i < kSize; ++i) a[i] = b[i] + 0.5f * c[i];
    benchmark::DoNotOptimize(a.data());
    benchmark::ClobberMemory();
    best = std::max(best, 12.0 * kSize / (seconds() - start));
  }
  return best;
}

struct Machine {
  double peak_flops = measure_peak_flops();
  double bandwidth = measure_bandwidth();
};
const Machine& machine() {
  static const Machine measured;
  return measured;
}

std::vector<float> noise(std::int64_t n, unsigned seed = 1) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> out(n);
  for (float& x : out) x = uniform(engine);
  return out;
}

using Counter = benchmark::Counter;

void report_flops(benchmark::State& state, double flops) {
  state.counters["GFLOP/s"] =
      Counter(flops * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["of_peak"] =
      Counter(flops / machine().peak_flops, Counter::kIsIterationInvariantRate);
}
void report_bytes(benchmark::State& state, double bytes) {
  state.counters["GB/s"] =
      Counter(bytes * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["of_memory"] =
      Counter(bytes / machine().bandwidth, Counter::kIsIterationInvariantRate);
}

void machine_limits(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(&machine());
  state.counters["peak_GFLOP/s"] = machine().peak_flops * 1e-9;
  state.counters["memory_GB/s"] = machine().bandwidth * 1e-9;
}

struct Product {
  const char* name;
  std::int64_t batch, m, n, k;
  bool trans_a, trans_b;
};

// The products of a GPT block of 1024 tokens with hidden size 256, and squares.
const Product kProducts[] = {
    {"square_nn", 1, 1024, 1024, 1024, false, false},
    {"square_nt", 1, 1024, 1024, 1024, false, true},
    {"square_tn", 1, 1024, 1024, 1024, true, false},
    {"gpt_qkv", 1, 1024, 768, 256, false, false},
    {"gpt_proj", 1, 1024, 256, 256, false, false},
    {"gpt_up", 1, 1024, 1024, 256, false, false},
    {"gpt_down", 1, 1024, 256, 1024, false, false},
    {"gpt_up_dx", 1, 1024, 256, 1024, false, true},
    {"gpt_down_dx", 1, 1024, 1024, 256, false, true},
    {"gpt_up_dw", 1, 256, 1024, 1024, true, false},
    {"gpt_down_dw", 1, 1024, 256, 1024, true, false},
    {"heads_scores", 64, 128, 128, 32, false, true},
    {"heads_values", 64, 128, 32, 128, false, false},
    {"tiny", 1, 16, 16, 8, false, false},
};

void matmul_bench(benchmark::State& state, const Product& p, DType dtype) {
  KernelContext context;
  MatmulArgs args;
  args.batch = p.batch, args.m = p.m, args.n = p.n, args.k = p.k;
  args.trans_a = p.trans_a, args.trans_b = p.trans_b;
  args.stride_a = p.m * p.k, args.stride_b = p.k * p.n;
  args.stride_c = p.m * p.n;
  const std::int64_t size =
      p.batch * std::max({p.m * p.k, p.k * p.n, p.m * p.n});
  const std::vector<float> values = noise(size);
  std::vector<double> a(size), b(size), c(size);  // Room for any dtype
  cast(context, DType::kF32, values.data(), dtype, a.data(), size);
  cast(context, DType::kF32, values.data(), dtype, b.data(), size);
  for (auto _ : state) {
    matmul(context, dtype, args, a.data(), b.data(), c.data());
  }
  report_flops(state, 2.0 * p.batch * p.m * p.n * p.k);
}

// Sizes of one activation of the same GPT: in cache, as in training.
constexpr std::int64_t kRows = 1024;
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kWide = 1024;

struct Arrays {
  explicit Arrays(std::int64_t n)
      : n(n), a(noise(n, 1)), b(noise(n, 2)), c(noise(n, 3)), d(n, 0.0f) {}
  std::int64_t n;
  std::vector<float> a, b, c, d;
};

// Runs `kernel` on arrays of n elements; it moves `arrays` of them.
template <typename Fn>
void memory_bench(const std::string& name, std::int64_t n, double arrays,
                  Fn kernel) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [n, arrays, kernel](benchmark::State& state) {
                                 KernelContext context;
                                 Arrays x(n);
                                 for (auto _ : state) kernel(context, x);
                                 report_bytes(state, 4.0 * arrays * n);
                               });
}

void register_elementwise(const std::string& size, std::int64_t n) {
  const auto unary_bench = [&](const char* name, UnaryOp op) {
    memory_bench(std::string(name) + size, n, 2,
                 [op](KernelContext& context, Arrays& x) {
                   unary(context, op, DType::kF32, x.n, x.a.data(), x.d.data());
                 });
    memory_bench(std::string(name) + "_backward" + size, n, 3,
                 [op](KernelContext& context, Arrays& x) {
                   unary_backward(context, op, DType::kF32, x.n, x.a.data(),
                                  x.b.data(), x.d.data());
                 });
  };
  unary_bench("gelu", UnaryOp::kGeluTanh);
  unary_bench("relu", UnaryOp::kRelu);
  unary_bench("tanh", UnaryOp::kTanh);
  memory_bench("add" + size, n, 3, [](KernelContext& context, Arrays& x) {
    binary_same_shape(context, BinaryOp::kAdd, DType::kF32, x.n, x.a.data(),
                      x.b.data(), x.d.data());
  });
  memory_bench("axpy" + size, n, 3, [](KernelContext& context, Arrays& x) {
    axpy(context, DType::kF32, x.n, 0.5, x.a.data(), x.d.data());
  });
  memory_bench("fill" + size, n, 1, [](KernelContext& context, Arrays& x) {
    fill(context, DType::kF32, x.n, x.d.data(), 1.0);
  });
  memory_bench(
      "cast_bf16" + size, n, 1.5, [](KernelContext& context, Arrays& x) {
        cast(context, DType::kF32, x.a.data(), DType::kBF16, x.d.data(), x.n);
      });
  memory_bench("sum_squares" + size, n, 1,
               [](KernelContext& context, Arrays& x) {
                 benchmark::DoNotOptimize(
                     sum_squares(context, DType::kF32, x.n, x.a.data()));
               });
  memory_bench("dropout" + size, n, 2, [](KernelContext& context, Arrays& x) {
    dropout(context, DType::kF32, whole_view({x.n}), {1, 2}, 0.1, x.a.data(),
            x.d.data());
  });
  memory_bench("fill_normal" + size, n, 1,
               [](KernelContext& context, Arrays& x) {
                 fill_normal(context, DType::kF32, whole_view({x.n}), {1, 2},
                             0.0, 1.0, x.d.data());
               });
  memory_bench("adamw" + size, n, 7, [](KernelContext& context, Arrays& x) {
    ParameterSlice slice;
    slice.n = x.n, slice.param = x.a.data(), slice.grad = x.b.data();
    AdamOptions options;
    options.lr = 1e-3, options.weight_decay = 0.1, options.decoupled = true;
    adam_step(context, slice, options, 10, x.d.data(), x.c.data());
  });
  memory_bench("sgd" + size, n, 5, [](KernelContext& context, Arrays& x) {
    ParameterSlice slice;
    slice.n = x.n, slice.param = x.a.data(), slice.grad = x.b.data();
    SgdOptions options;
    options.lr = 1e-3, options.momentum = 0.9;
    sgd_step(context, slice, options, x.d.data(), false);
  });
}

void register_rows(std::int64_t rows, std::int64_t cols) {
  const std::string size =
      "/" + std::to_string(rows) + "x" + std::to_string(cols);
  const std::int64_t n = rows * cols;
  memory_bench("add_row" + size, n, 2, [=](KernelContext& context, Arrays& x) {
    binary(context, BinaryOp::kAdd, DType::kF32, {rows, cols}, x.a.data(),
           {cols}, x.b.data(), x.d.data());
  });
  memory_bench("sum_rows" + size, n, 1, [=](KernelContext& context, Arrays& x) {
    sum_rows(context, DType::kF32, rows, cols, x.a.data(), x.d.data());
  });
  memory_bench("sum_last" + size, n, 1, [=](KernelContext& context, Arrays& x) {
    sum_last(context, DType::kF32, rows, cols, x.a.data(), x.d.data());
  });
  memory_bench("softmax" + size, n, 2, [=](KernelContext& context, Arrays& x) {
    softmax(context, DType::kF32, rows, cols, x.a.data(), x.d.data());
  });
  memory_bench("softmax_backward" + size, n, 3,
               [=](KernelContext& context, Arrays& x) {
                 softmax_backward(context, DType::kF32, rows, cols, x.a.data(),
                                  x.b.data(), x.d.data());
               });
  memory_bench("layer_norm" + size, n, 2,
               [=](KernelContext& context, Arrays& x) {
                 layer_norm(context, DType::kF32, rows, cols, 1e-5, x.a.data(),
                            x.b.data(), x.b.data(), x.d.data(), x.c.data(),
                            x.c.data() + rows);
               });
  memory_bench("layer_norm_backward" + size, n, 3,
               [=](KernelContext& context, Arrays& x) {
                 layer_norm_backward(
                     context, DType::kF32, rows, cols, x.a.data(), x.b.data(),
                     x.c.data(), x.c.data() + rows, x.b.data(), x.d.data(),
                     x.c.data() + 2 * rows, x.c.data() + 2 * rows + cols);
               });
  memory_bench("cross_entropy" + size, n, 1,
               [=](KernelContext& context, Arrays& x) {
                 const std::vector<std::int64_t> targets(rows, 3);
                 cross_entropy(context, DType::kF32, rows, cols, x.a.data(),
                               targets.data(), x.c.data(), x.c.data() + rows);
               });
  memory_bench("cross_entropy_backward" + size, n, 2,
               [=](KernelContext& context, Arrays& x) {
                 const std::vector<std::int64_t> targets(rows, 3);
                 const float dloss = 0.1f;
                 cross_entropy_backward(context, DType::kF32, rows, cols,
                                        x.a.data(), targets.data(), x.c.data(),
                                        &dloss, false, x.d.data());
               });
  memory_bench(
      "transpose" + size, n, 2, [=](KernelContext& context, Arrays& x) {
        transpose(context, DType::kF32, 1, rows, cols, x.a.data(), x.d.data());
      });
  memory_bench("split_heads" + size, n, 2,
               [=](KernelContext& context, Arrays& x) {
                 permute(context, DType::kF32, {8, rows / 8, 8, cols / 8},
                         {0, 2, 1, 3}, x.a.data(), x.d.data());
               });
  memory_bench("gather_rows" + size, n, 2,
               [=](KernelContext& context, Arrays& x) {
                 std::vector<std::int64_t> indices(rows);
                 for (std::int64_t i = 0; i < rows; ++i)
                   indices[i] = i * 37 % rows;
                 gather_rows(context, DType::kF32, {rows, cols}, x.a.data(),
                             DType::kI64, indices.data(), rows, x.d.data());
               });
  memory_bench(
      "scatter_add_rows" + size, n, 3, [=](KernelContext& context, Arrays& x) {
        std::vector<std::int64_t> indices(rows);
        for (std::int64_t i = 0; i < rows; ++i) indices[i] = i * 37 % rows;
        scatter_add_rows(context, DType::kF32, {rows, cols}, x.d.data(),
                         DType::kI64, indices.data(), rows, x.a.data());
      });
}

// Causal self-attention on packed projections; flops of the visible half.
void attention_bench(benchmark::State& state, bool backward) {
  const std::int64_t batch = state.range(0), heads = state.range(1);
  const std::int64_t rows = state.range(2), dim = state.range(3);
  const std::int64_t width = heads * dim;
  KernelContext context;
  AttentionArgs args;
  args.batch = batch, args.heads = heads, args.head_dim = dim;
  args.q_rows = args.k_rows = rows;
  args.scale = 1.0 / std::sqrt(static_cast<double>(dim));
  args.q = args.k = args.v = {rows * 3 * width, dim, 3 * width};
  args.out = {rows * width, dim, width};
  const std::vector<float> qkv = noise(batch * rows * 3 * width);
  std::vector<float> out(batch * rows * width), dout = noise(out.size());
  std::vector<float> dqkv(qkv.size()), total(batch * heads * rows);
  const auto forward = [&] {
    attention(context, DType::kF32, args, qkv.data(), qkv.data() + width,
              qkv.data() + 2 * width, out.data(), total.data());
  };
  forward();
  const AttentionGradStrides strides = {args.q, args.k, args.v, args.out};
  for (auto _ : state) {
    if (backward) {
      attention_backward(context, DType::kF32, args, strides, qkv.data(),
                         qkv.data() + width, qkv.data() + 2 * width, out.data(),
                         dout.data(), total.data(), dqkv.data(),
                         dqkv.data() + width, dqkv.data() + 2 * width);
    } else {
      forward();
    }
  }
  const double products = backward ? 5.0 : 2.0;
  report_flops(state, products * batch * heads * rows * rows * dim);
}

void register_all() {
  benchmark::RegisterBenchmark("machine", machine_limits)->Iterations(1);
  for (const Product& p : kProducts) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
      benchmark::RegisterBenchmark(
          ("matmul_" + std::string(dtype_name(dtype)) + "/" + p.name).c_str(),
          [p, dtype](benchmark::State& state) {
            matmul_bench(state, p, dtype);
          });
    }
  }
  for (const bool backward : {false, true}) {
    benchmark::RegisterBenchmark(backward ? "attention_backward" : "attention",
                                 [backward](benchmark::State& state) {
                                   attention_bench(state, backward);
                                 })
        ->ArgNames({"batch", "heads", "rows", "dim"})
        ->Args({8, 8, 128, 32})
        ->Args({1, 12, 1024, 64});
  }
  register_elementwise("/cached", kRows * kHidden);
  register_elementwise("/memory", std::int64_t{1} << 25);
  register_rows(kRows, kHidden);
  register_rows(kRows, kWide);
}

}  // namespace
}  // namespace shardbook::kernels

int main(int argc, char** argv) {
#ifdef SHARDBOOK_HAVE_OPENMP
  omp_set_num_threads(1);
#endif
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  shardbook::kernels::register_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
