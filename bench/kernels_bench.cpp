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
#include "core/kernels/vocabulary.h"

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

// How much `amount` each iteration has, and as a share of the machine's `most`.
void report(benchmark::State& state, const char* unit, const char* share,
            double amount, double most) {
  constexpr auto kRate = benchmark::Counter::kIsIterationInvariantRate;
  state.counters[unit] = {amount * 1e-9, kRate};
  state.counters[share] = {amount / most, kRate};
}
void report_flops(benchmark::State& state, double flops) {
  report(state, "GFLOP/s", "of_peak", flops, machine().peak_flops);
}
void report_bytes(benchmark::State& state, double bytes) {
  report(state, "GB/s", "of_memory", bytes, machine().bandwidth);
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
  std::int64_t n;
  std::vector<float> noises[3] = {noise(n, 1), noise(n, 2), noise(n, 3)};
  std::vector<float> zeros = std::vector<float>(n);
  float *a = noises[0].data(), *b = noises[1].data(), *c = noises[2].data(),
        *d = zeros.data();
  KernelContext context = KernelContext();
};

constexpr DType kF32 = DType::kF32;

// Runs `kernel` on arrays of n elements; it moves `arrays` of them.
template <typename Fn>
void memory_bench(const std::string& name, std::int64_t n, double arrays,
                  Fn kernel) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [n, arrays, kernel](benchmark::State& state) {
                                 Arrays x{n};
                                 for (auto _ : state) kernel(x);
                                 report_bytes(state, 4.0 * arrays * n);
                               });
}

void register_elementwise(const std::string& size, std::int64_t n) {
  const auto bench = [&](const std::string& name, double arrays, auto kernel) {
    memory_bench(name + size, n, arrays, kernel);
  };
  const auto unary_bench = [&](const char* name, UnaryOp op) {
    bench(name, 2,
          [op](Arrays& x) { unary(x.context, op, kF32, x.n, x.a, x.d); });
    bench(std::string(name) + "_backward", 3, [op](Arrays& x) {
      unary_backward(x.context, op, kF32, x.n, x.a, x.b, x.d);
    });
  };
  unary_bench("gelu", UnaryOp::kGeluTanh);
  unary_bench("relu", UnaryOp::kRelu);
  unary_bench("tanh", UnaryOp::kTanh);
  bench("add", 3, [](Arrays& x) {
    binary(x.context, BinaryOp::kAdd, kF32, {x.n}, x.a, {x.n}, x.b, x.d);
  });
  bench("axpy", 3,
        [](Arrays& x) { axpy(x.context, kF32, x.n, 0.5, x.a, x.d); });
  bench("fill", 1, [](Arrays& x) { fill(x.context, kF32, x.n, x.d, 1.0); });
  bench("cast_bf16", 1.5,
        [](Arrays& x) { cast(x.context, kF32, x.a, DType::kBF16, x.d, x.n); });
  bench("sum_squares", 1, [](Arrays& x) {
    benchmark::DoNotOptimize(sum_squares(x.context, kF32, x.n, x.a));
  });
  bench("dropout", 2, [](Arrays& x) {
    dropout(x.context, kF32, whole_view({x.n}), {1, 2}, 0.1, x.a, x.d);
  });
  bench("fill_normal", 1, [](Arrays& x) {
    fill_normal(x.context, kF32, whole_view({x.n}), {1, 2}, 0.0, 1.0, x.d);
  });
  bench("adamw", 7, [](Arrays& x) {
    ParameterSlice slice;
    slice.n = x.n, slice.param = x.a, slice.grad = x.b;
    AdamOptions options;
    options.lr = 1e-3, options.weight_decay = 0.1, options.decoupled = true;
    adam_step(x.context, slice, options, 10, x.d, x.c);
  });
  bench("sgd", 5, [](Arrays& x) {
    ParameterSlice slice;
    slice.n = x.n, slice.param = x.a, slice.grad = x.b;
    SgdOptions options;
    options.lr = 1e-3, options.momentum = 0.9;
    sgd_step(x.context, slice, options, x.d, false);
  });
}

void register_rows(std::int64_t rows, std::int64_t cols) {
  const std::string size =
      "/" + std::to_string(rows) + "x" + std::to_string(cols);
  const auto bench = [&](const std::string& name, double arrays, auto kernel) {
    memory_bench(name + size, rows * cols, arrays, kernel);
  };
  bench("add_row", 2, [=](Arrays& x) {
    binary(x.context, BinaryOp::kAdd, kF32, {rows, cols}, x.a, {cols}, x.b,
           x.d);
  });
  bench("sum_rows", 1,
        [=](Arrays& x) { sum_rows(x.context, kF32, rows, cols, x.a, x.d); });
  bench("sum_last", 1, [=](Arrays& x) {
    sum_to_shape(x.context, kF32, {rows, cols}, x.a, {rows, 1}, x.d);
  });
  bench("softmax", 2,
        [=](Arrays& x) { softmax(x.context, kF32, rows, cols, x.a, x.d); });
  bench("softmax_backward", 3, [=](Arrays& x) {
    softmax_backward(x.context, kF32, rows, cols, x.a, x.b, x.d);
  });
  bench("layer_norm", 2, [=](Arrays& x) {
    layer_norm(x.context, kF32, rows, cols, 1e-5, x.a, x.b, x.b, x.d, x.c,
               x.c + rows);
  });
  bench("layer_norm_backward", 3, [=](Arrays& x) {
    layer_norm_backward(x.context, kF32, rows, cols, x.a, x.b, x.c, x.c + rows,
                        x.b, x.d, x.c + 2 * rows, x.c + 2 * rows + cols);
  });
  const std::vector<std::int64_t> targets(rows, 3);
  bench("cross_entropy", 1, [=](Arrays& x) {
    cross_entropy(x.context, kF32, rows, cols, x.a, targets.data(), x.c,
                  x.c + rows);
  });
  bench("cross_entropy_backward", 2, [=](Arrays& x) {
    const float dloss = 0.1f;
    vocabulary_gradient(x.context, kF32, {rows, cols, 0, cols}, x.a,
                        targets.data(), x.c, &dloss, false, x.d);
  });
  bench("transpose", 2, [=](Arrays& x) {
    permute(x.context, kF32, {rows, cols}, {1, 0}, x.a, x.d);
  });
  bench("split_heads", 2, [=](Arrays& x) {
    permute(x.context, kF32, {8, rows / 8, 8, cols / 8}, {0, 2, 1, 3}, x.a,
            x.d);
  });
  std::vector<std::int64_t> indices(rows);
  for (std::int64_t i = 0; i < rows; ++i) indices[i] = i * 37 % rows;
  bench("gather_rows", 2, [=](Arrays& x) {
    gather_rows(x.context, kF32, {rows, cols}, x.a, DType::kI64, indices.data(),
                rows, x.d);
  });
  bench("scatter_add_rows", 3, [=](Arrays& x) {
    scatter_add_rows(x.context, kF32, {rows, cols}, x.d, DType::kI64,
                     indices.data(), rows, x.a);
  });
}

// Causal self-attention on packed projections; flops of the visible half.
void attention_bench(benchmark::State& state, bool backward) {
  const std::int64_t batch = state.range(0), heads = state.range(1);
  const std::int64_t rows = state.range(2), dim = state.range(3);
  const std::int64_t width = heads * dim;
  KernelContext context;
  AttentionArgs args;
  args.batch = batch, args.heads = args.kv_heads = heads, args.head_dim = dim;
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
}
