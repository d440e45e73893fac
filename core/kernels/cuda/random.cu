// Random numbers: the bits of the CPU's kernels, from the same philox.h.
//
// One thread owns one block of Philox, which is four neighbouring elements of
// the global tensor, as far as the view holds them.
//
// Uniform numbers and dropout equal the CPU's bit for bit. Normal
// numbers go through log, cos and sin in f64, which differ from the CPU's
// vectors by a few units in the last place: 1e-14 * stddev before rounding.

#include "core/kernels/random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/convert.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cuda {

namespace {

constexpr int kDraws = 4;  // Elements of one block of Philox
using Words = std::array<std::uint32_t, kDraws>;

// ViewRuns by value.
struct RunWalk {
  std::int64_t count, length;
  std::uint64_t step, first;
  int ndim;
  std::int64_t sizes[kMaxDims];
  std::uint64_t strides[kMaxDims];

  __device__ std::uint64_t start(std::int64_t run) const {
    std::uint64_t at = first;
    for (int d = ndim - 1; d >= 0; --d) {
      at += static_cast<std::uint64_t>(run % sizes[d]) * strides[d];
      run /= sizes[d];
    }
    return at;
  }
};

// out[i] = draw(words, w, x[i]), where the element is the w-th of its block.
// A run of step 1 has `per_run` blocks, any other one for each element.
template <typename T, typename Draw>
__global__ void draw_kernel(RunWalk runs, std::int64_t per_run, RandomKey key,
                            const T* x, T* out, Draw draw) {
  const std::int64_t items = runs.count * per_run;
  for (std::int64_t item = first_index(); item < items; item += index_step()) {
    const std::int64_t run = runs.count == 1 ? 0 : item / per_run;
    const auto part = static_cast<std::uint64_t>(item - run * per_run);
    const std::uint64_t start = runs.start(run);
    // The block, its elements in the view [from, to), and where they lie.
    std::uint64_t block, from, to;
    std::int64_t local = run * runs.length;
    if (runs.step == 1) {
      block = start / kDraws + part;
      from = max(start, block * kDraws);
      to = min(start + static_cast<std::uint64_t>(runs.length),
               block * kDraws + kDraws);
      local += static_cast<std::int64_t>(from - start);
    } else {
      from = start + part * runs.step;
      to = from + 1;
      block = from / kDraws;
      local += static_cast<std::int64_t>(part);
    }
    if (from >= to) continue;
    const Words words = random_block(key, block);
    const bool whole = to - from == kDraws;
    const bool aligned =
        reinterpret_cast<std::uintptr_t>(out + local) % (kDraws * sizeof(T)) ==
            0 &&
        (!Draw::kReads ||
         reinterpret_cast<std::uintptr_t>(x + local) % (kDraws * sizeof(T)) ==
             0);
    if (whole && aligned) {
      AlignedVector<T, kDraws> in{};
      if constexpr (Draw::kReads) in = load_vector<kDraws>(x + local);
      AlignedVector<T, kDraws> drawn;
#pragma unroll
      for (int w = 0; w < kDraws; ++w) drawn[w] = draw(words, w, in[w]);
      store_vector(out + local, drawn);
      continue;
    }
#pragma unroll
    for (int w = 0; w < kDraws; ++w) {
      const std::uint64_t element = block * kDraws + w;
      if (element < from || element >= to) continue;
      const std::int64_t at = local + static_cast<std::int64_t>(element - from);
      T in{};
      if constexpr (Draw::kReads) in = x[at];
      out[at] = draw(words, w, in);
    }
  }
}

template <typename T, typename Draw>
void launch_draw(KernelContext& context, const char* name,
                 const GlobalView& view, RandomKey key, const void* x,
                 void* out, const Draw& draw) {
  const ViewRuns runs = plan_runs(view);
  if (runs.count * runs.length == 0) return;
  SB_CHECK(runs.sizes.size() <= kMaxDims, name, ": a view with ",
           runs.sizes.size(), " dims outside its runs; at most ", kMaxDims);
  RunWalk walk{};
  walk.count = runs.count;
  walk.length = runs.length;
  walk.step = runs.step;
  walk.first = runs.first;
  walk.ndim = static_cast<int>(runs.sizes.size());
  std::copy(runs.sizes.begin(), runs.sizes.end(), walk.sizes);
  std::copy(runs.strides.begin(), runs.strides.end(), walk.strides);
  // A run that begins inside a block touches one block more.
  const std::int64_t per_run =
      runs.step == 1 ? (runs.length + 2 * (kDraws - 1)) / kDraws : runs.length;
  launch(context, name, blocks_for(walk.count * per_run), kBlock,
         draw_kernel<T, Draw>, walk, per_run, key, x, out, draw);
}

template <typename T>
constexpr int kUniformBits = std::is_same_v<T, __nv_bfloat16> ? 8
                             : std::is_same_v<T, __half>      ? 11
                                                              : 24;

template <typename T>
struct Uniform {
  static constexpr bool kReads = false;
  Compute<T> start, width;
  __device__ T operator()(const Words& words, int w, T) const {
    using S = Compute<T>;
    constexpr S kUnit =
        S(1) / static_cast<S>(std::uint32_t{1} << kUniformBits<T>);
    const S u = static_cast<S>(words[w] >> (32 - kUniformBits<T>)) * kUnit;
    return narrow<T>(std::fma(width, u, start));
  }
};

template <typename T>
struct Normal {
  static constexpr bool kReads = false;
  double mean, stddev;
  __device__ T operator()(const Words& words, int w, T) const {
    // Box-Muller: the pair of words gives two numbers; this is one of them.
    constexpr double kTwoPi = 6.283185307179586476925286766559;
    const int pair = w / 2 * 2;
    const double u = (words[pair] + 1.0) * 0x1p-32;  // In (0, 1]
    const double v = words[pair + 1] * (kTwoPi * 0x1p-32);
    const double radius = std::sqrt(-2.0 * std::log(u));
    const double normal = radius * (w % 2 == 0 ? std::cos(v) : std::sin(v));
    return from_double<T>(std::fma(stddev, normal, mean));
  }
};

template <typename T>
struct Dropout {
  static constexpr bool kReads = true;
  std::uint32_t threshold;
  Compute<T> factor;
  __device__ T operator()(const Words& words, int w, T x) const {
    const Compute<T> kept = widen(x) * factor;
    return narrow<T>(words[w] >= threshold ? kept : Compute<T>(0));
  }
};

}  // namespace

void fill_uniform(KernelContext& context, DType dtype, const GlobalView& view,
                  RandomKey key, double low, double high, void* x) {
  with_floating("fill_uniform", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const Uniform<T> draw{static_cast<S>(low), static_cast<S>(high - low)};
    launch_draw<T>(context, "fill_uniform", view, key, nullptr, x, draw);
  });
}

void fill_normal(KernelContext& context, DType dtype, const GlobalView& view,
                 RandomKey key, double mean, double stddev, void* x) {
  with_floating("fill_normal", dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_draw<T>(context, "fill_normal", view, key, nullptr, x,
                   Normal<T>{mean, stddev});
  });
}

void dropout(KernelContext& context, DType dtype, const GlobalView& view,
             RandomKey key, double p, const void* x, void* y) {
  const std::uint32_t threshold = dropout_threshold(p);
  with_floating("dropout", dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto factor = static_cast<Compute<T>>(1.0 / (1.0 - p));
    launch_draw<T>(context, "dropout", view, key, x, y,
                   Dropout<T>{threshold, factor});
  });
}

SHARDBOOK_CUDA_KERNEL(fill_uniform);
SHARDBOOK_CUDA_KERNEL(fill_normal);
SHARDBOOK_CUDA_KERNEL(dropout);

}  // namespace shardbook::kernels::cuda
