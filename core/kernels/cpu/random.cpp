#include "core/kernels/random.h"

#include <algorithm>
#include <cmath>

#include "core/kernels/cpu/random_runs.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cpu {

namespace {

// Blocks computed side by side.
constexpr int kSideBySide = 16;
constexpr std::int64_t kRun = 4 * kSideBySide;

#ifdef __AVX512F__
// The high and the low halves of 16 products.
inline void multiply_wide(__m512i x, __m512i factor, __m512i* high,
                          __m512i* low) {
  const __m512i even = _mm512_mul_epu32(x, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

// words[4 i .. 4 i + 3] = the block at counter `first` + i, for kSideBySide i.
void philox_run(RandomKey key, std::uint64_t first, std::uint32_t* words) {
  const __m512i lanes =
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i start = _mm512_set1_epi32(static_cast<int>(first));
  const __m512i factor0 = _mm512_set1_epi64(kPhiloxMultiplier0);
  const __m512i factor1 = _mm512_set1_epi64(kPhiloxMultiplier1);
  __m512i c0 = _mm512_add_epi32(start, lanes);
  // Lanes that wrapped around carry into the upper half.
  const __mmask16 carry = _mm512_cmplt_epu32_mask(c0, start);
  __m512i c1 = _mm512_set1_epi32(static_cast<int>(first >> 32));
  c1 = _mm512_mask_add_epi32(c1, carry, c1, _mm512_set1_epi32(1));
  __m512i c2 = _mm512_set1_epi32(static_cast<int>(key.stream));
  __m512i c3 = _mm512_set1_epi32(static_cast<int>(key.stream >> 32));
  __m512i k0 = _mm512_set1_epi32(static_cast<int>(key.seed));
  __m512i k1 = _mm512_set1_epi32(static_cast<int>(key.seed >> 32));
  for (int round = 0; round < kPhiloxRounds; ++round) {
    __m512i high0, low0, high1, low1;
    multiply_wide(c0, factor0, &high0, &low0);
    multiply_wide(c2, factor1, &high1, &low1);
    c0 = _mm512_ternarylogic_epi32(high1, c1, k0, 0x96);  // xor of three
    c1 = low1;
    c2 = _mm512_ternarylogic_epi32(high0, c3, k1, 0x96);
    c3 = low0;
    k0 =
        _mm512_add_epi32(k0, _mm512_set1_epi32(static_cast<int>(kPhiloxWeyl0)));
    k1 =
        _mm512_add_epi32(k1, _mm512_set1_epi32(static_cast<int>(kPhiloxWeyl1)));
  }
  // From word by word to block by block: 4 x 4 transposes within lanes, then
  // the lanes in order.
  const __m512i a = _mm512_unpacklo_epi32(c0, c1);
  const __m512i b = _mm512_unpackhi_epi32(c0, c1);
  const __m512i c = _mm512_unpacklo_epi32(c2, c3);
  const __m512i d = _mm512_unpackhi_epi32(c2, c3);
  const __m512i t0 = _mm512_unpacklo_epi64(a, c);  // Blocks 0, 4, 8, 12
  const __m512i t1 = _mm512_unpackhi_epi64(a, c);  // Blocks 1, 5, 9, 13
  const __m512i t2 = _mm512_unpacklo_epi64(b, d);
  const __m512i t3 = _mm512_unpackhi_epi64(b, d);
  const __m512i low01 = _mm512_shuffle_i32x4(t0, t1, 0x44);
  const __m512i low23 = _mm512_shuffle_i32x4(t2, t3, 0x44);
  const __m512i high01 = _mm512_shuffle_i32x4(t0, t1, 0xee);
  const __m512i high23 = _mm512_shuffle_i32x4(t2, t3, 0xee);
  _mm512_storeu_si512(words, _mm512_shuffle_i32x4(low01, low23, 0x88));
  _mm512_storeu_si512(words + 16, _mm512_shuffle_i32x4(low01, low23, 0xdd));
  _mm512_storeu_si512(words + 32, _mm512_shuffle_i32x4(high01, high23, 0x88));
  _mm512_storeu_si512(words + 48, _mm512_shuffle_i32x4(high01, high23, 0xdd));
}
#else
// The same, a block at a time.
void philox_run(RandomKey key, std::uint64_t first, std::uint32_t* words) {
  for (int i = 0; i < kSideBySide; ++i) {
    const std::uint64_t block = first + static_cast<std::uint64_t>(i);
    const auto bits = philox4x32({static_cast<std::uint32_t>(block),
                                  static_cast<std::uint32_t>(block >> 32),
                                  static_cast<std::uint32_t>(key.stream),
                                  static_cast<std::uint32_t>(key.stream >> 32)},
                                 {static_cast<std::uint32_t>(key.seed),
                                  static_cast<std::uint32_t>(key.seed >> 32)});
    std::copy(bits.begin(), bits.end(), words + 4 * i);
  }
}
#endif

// Calls fn(local index, global index, step, n) on stretches of the view.
template <typename Fn>
void for_runs(const GlobalView& view, const Fn& fn) {
  const ViewRuns runs = plan_runs(view);
  parallel_for(
      0, runs.count * runs.length, kGrain,
      [&](std::int64_t from, std::int64_t to) {
        while (from < to) {
          const std::int64_t run = from / runs.length;
          const std::int64_t within = from % runs.length;
          const std::int64_t n = std::min(to - from, runs.length - within);
          fn(from,
             runs.start(run) + static_cast<std::uint64_t>(within) * runs.step,
             runs.step, n);
          from += n;
        }
      });
}

// Calls fn(local index, words, n) on short stretches with their random bits.
template <typename Fn>
void for_bits(const GlobalView& view, RandomKey key, const Fn& fn) {
  for_runs(view, [&](std::int64_t local, std::uint64_t global,
                     std::uint64_t step, std::int64_t n) {
    constexpr std::int64_t kPart = 1024;
    std::uint32_t words[kPart];
    for (std::int64_t i = 0; i < n; i += kPart) {
      const std::int64_t size = std::min(kPart, n - i);
      random_run(key, global + static_cast<std::uint64_t>(i) * step, step, size,
                 words);
      fn(local + i, words, size);
    }
  });
}

// Two normal numbers from each pair of words.
void box_muller(const std::uint32_t* words, std::int64_t pairs, double* out) {
  using V = Vec<double>;
  constexpr std::int64_t kWidth = kLanes<double>;
  constexpr double kTwoPi = 6.283185307179586476925286766559;
  alignas(64) double u[kWidth], v[kWidth];
  for (std::int64_t i = 0; i < pairs; i += kWidth) {
    const std::int64_t n = std::min(kWidth, pairs - i);
    for (std::int64_t j = 0; j < kWidth; ++j) {
      const std::int64_t pair = i + std::min(j, n - 1);
      u[j] = (words[2 * pair] + 1.0) * 0x1p-32;  // In (0, 1]
      v[j] = words[2 * pair + 1] * (kTwoPi * 0x1p-32);
    }
    const V radius = xsimd::sqrt(V(-2.0) * xsimd::log(V::load_aligned(u)));
    const auto [sine, cosine] = xsimd::sincos(V::load_aligned(v));
    (radius * cosine).store_aligned(u);
    (radius * sine).store_aligned(v);
    for (std::int64_t j = 0; j < n; ++j) {
      out[2 * (i + j)] = u[j];
      out[2 * (i + j) + 1] = v[j];
    }
  }
}

template <typename T>
constexpr int kUniformBits = std::is_same_v<T, BF16>  ? 8
                             : std::is_same_v<T, F16> ? 11
                                                      : 24;

}  // namespace

void random_run(RandomKey key, std::uint64_t first, std::uint64_t step,
                std::int64_t n, std::uint32_t* words) {
  if (step != 1) {
    for (std::int64_t i = 0; i < n; ++i) {
      words[i] = random_bits(key, first + static_cast<std::uint64_t>(i) * step);
    }
    return;
  }
  std::uint32_t run[kRun];
  std::int64_t done = 0;
  while (done < n) {
    const std::uint64_t at = first + static_cast<std::uint64_t>(done);
    const std::int64_t skip = static_cast<std::int64_t>(at % 4);
    const std::int64_t size = std::min(n - done, kRun - skip);
    if (size == kRun) {
      philox_run(key, at / 4, words + done);
    } else {
      philox_run(key, at / 4, run);
      std::copy(run + skip, run + skip + size, words + done);
    }
    done += size;
  }
}

void fill_uniform(KernelContext&, DType dtype, const GlobalView& view,
                  RandomKey key, double low, double high, void* x) {
  dispatch_floating("fill_uniform", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    constexpr int kShift = 32 - kUniformBits<T>;
    const S unit = S(1) / static_cast<S>(std::uint32_t{1} << kUniformBits<T>);
    const S width = static_cast<S>(high - low), start = static_cast<S>(low);
    for_bits(view, key,
             [&](std::int64_t at, const std::uint32_t* words, std::int64_t n) {
               T* out = static_cast<T*>(x) + at;
               for (std::int64_t i = 0; i < n; ++i) {
                 const S u = static_cast<S>(words[i] >> kShift) * unit;
                 out[i] = narrow<T>(start + width * u);
               }
             });
  });
}

void fill_normal(KernelContext&, DType dtype, const GlobalView& view,
                 RandomKey key, double mean, double stddev, void* x) {
  dispatch_floating("fill_normal", dtype, [&](auto zero) {
    using T = decltype(zero);
    for_runs(view, [&](std::int64_t local, std::uint64_t global,
                       std::uint64_t step, std::int64_t n) {
      T* out = static_cast<T*>(x) + local;
      constexpr std::int64_t kPart = 512;
      std::uint32_t words[kPart];
      double normals[kPart];
      if (step != 1) {
        for (std::int64_t i = 0; i < n; ++i) {
          const std::uint64_t at =
              global + static_cast<std::uint64_t>(i) * step;
          random_run(key, at / 2 * 2, 1, 2, words);
          box_muller(words, 1, normals);
          out[i] = narrow<T>(mean + stddev * normals[at % 2]);
        }
        return;
      }
      // Whole pairs around the stretch; the odd ends are left out.
      for (std::int64_t i = 0; i < n;) {
        const std::uint64_t at = global + static_cast<std::uint64_t>(i);
        const std::int64_t skip = static_cast<std::int64_t>(at % 2);
        const std::int64_t size = std::min(n - i, kPart - skip);
        const std::int64_t pairs = (skip + size + 1) / 2;
        random_run(key, at - static_cast<std::uint64_t>(skip), 1, 2 * pairs,
                   words);
        box_muller(words, pairs, normals);
        for (std::int64_t j = 0; j < size; ++j) {
          out[i + j] = narrow<T>(mean + stddev * normals[skip + j]);
        }
        i += size;
      }
    });
  });
}

void dropout(KernelContext&, DType dtype, const GlobalView& view, RandomKey key,
             double p, const void* x, void* y) {
  const std::uint32_t threshold = dropout_threshold(p);
  dispatch_floating("dropout", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const S factor = static_cast<S>(1.0 / (1.0 - p));
    for_bits(view, key,
             [&](std::int64_t at, const std::uint32_t* words, std::int64_t n) {
               const T* in = static_cast<const T*>(x) + at;
               T* out = static_cast<T*>(y) + at;
               for (std::int64_t i = 0; i < n; ++i) {
                 const S kept = widen(in[i]) * factor;
                 out[i] = narrow<T>(words[i] >= threshold ? kept : S(0));
               }
             });
  });
}

}  // namespace shardbook::kernels::cpu
