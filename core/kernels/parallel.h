#pragma once

// Loops over the cores of this rank.

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>

#include <exception>
#endif

namespace shardbook::kernels {

/// Calls fn(from, to) on pieces that cover [begin, end). Pieces start at
/// multiples of `grain` after begin and hold at least `grain` items (except the
/// last); a range of one grain, or one thread, runs in the caller.
///
/// Threads: as many as OpenMP gives the calling thread. Which pieces are made
/// depends on that number, so fn computes each item (or each grain) alone. The
/// first error that fn throws is thrown again here.
template <typename Fn>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const Fn& fn) {
  const std::int64_t n = end - begin;
  if (n <= 0) return;
#ifdef _OPENMP
  const std::int64_t grains = (n + grain - 1) / grain;
  const int threads =
      static_cast<int>(std::min<std::int64_t>(grains, omp_get_max_threads()));
  if (threads > 1 && !omp_in_parallel()) {
    std::exception_ptr error;
#pragma omp parallel num_threads(threads)
    {
      // Balanced: whole grains, spread evenly over the threads.
      const std::int64_t id = omp_get_thread_num();
      const std::int64_t team = omp_get_num_threads();
      const std::int64_t from = begin + grains * id / team * grain;
      const std::int64_t to =
          std::min(end, begin + grains * (id + 1) / team * grain);
      try {
        if (from < to) fn(from, to);
      } catch (...) {
#pragma omp critical(shardbook_parallel_for)
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  fn(begin, end);
}

}  // namespace shardbook::kernels
