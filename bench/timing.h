#pragma once

// What the benchmarks measure time with.

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/stream.h"

namespace shardbook::bench {

/// Seconds by a clock that never goes back.
inline double now_s() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <typename Body>
double seconds_of(const Body& body) {
  const double begin_s = now_s();
  body();
  return now_s() - begin_s;
}

/// Seconds of one call on the GPU, the mean of `count`: events in its own queue
/// mark the begin and the end.
template <typename Body>
double gpu_seconds(const Body& body, int count) {
  Event begin, end;
  begin.record();
  for (int i = 0; i < count; ++i) body();
  end.record();
  end.synchronize();
  return end.elapsed_s(begin) / count;
}

inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace shardbook::bench
