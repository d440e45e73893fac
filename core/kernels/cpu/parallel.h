#pragma once

// Loops over the cores of this rank.

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>

#include <exception>
#endif

namespace shardbook::kernels::cpu {

/// How many threads a loop of this rank may use.
inline int max_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

/// Calls fn(piece, from, to) on pieces that cover [begin, end). Pieces start at
/// multiples of `grain` after begin and hold at least `grain` items (except the
/// last); a range of one grain, or one thread, runs in the caller.
///
/// Threads: as many as OpenMP gives the calling thread; `piece` is less than
/// max_threads(). The pieces depend on that number, so fn computes each item
/// (or grain) independently. The first error of fn is thrown again here.
template <typename Fn>
void parallel_pieces(std::int64_t begin, std::int64_t end, std::int64_t grain,
                     const Fn& fn) {
  const std::int64_t n = end - begin;
  if (n <= 0) return;
#ifdef _OPENMP
  const std::int64_t grains = (n + grain - 1) / grain;
  const int threads = grains == 1 ? 1 : max_threads();
  if (threads > 1) {
    std::exception_ptr error;
#pragma omp parallel num_threads( \
    static_cast <int>(std::min <std::int64_t>(grains, threads)))
    {
      // Balanced: whole grains, spread evenly over the threads.
      const std::int64_t id = omp_get_thread_num();
      const std::int64_t team = omp_get_num_threads();
      const std::int64_t from = begin + grains * id / team * grain;
      const std::int64_t to =
          std::min(end, begin + grains * (id + 1) / team * grain);
      try {
        if (from < to) fn(static_cast<int>(id), from, to);
      } catch (...) {
#pragma omp critical(shardbook_parallel_for)
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  fn(0, begin, end);
}

/// The same for loops that need no scratch of their own: fn(from, to).
template <typename Fn>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const Fn& fn) {
  parallel_pieces(
      begin, end, grain,
      [&fn](int, std::int64_t from, std::int64_t to) { fn(from, to); });
}

}  // namespace shardbook::kernels::cpu
