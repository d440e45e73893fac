#include "chapters/common/run/micro_batches.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook {

void check_micro_batches(std::int64_t batch, std::int64_t n) {
  SB_CHECK(n >= 1 && n <= batch, "--micro-batches ", n, ": give 1 to ", batch,
           ", the samples of a batch");
}

std::vector<MicroBatch> strided_micro_batches(std::int64_t batch,
                                              std::int64_t n) {
  check_micro_batches(batch, n);
  std::vector<MicroBatch> pieces;
  for (std::int64_t i = 0; i < n; ++i) {
    pieces.push_back({BatchSlice{i, n}, (batch - i + n - 1) / n});
  }
  return pieces;
}

std::vector<MicroBatch> ceil_micro_batches(std::int64_t batch, std::int64_t n) {
  check_micro_batches(batch, n);
  const std::int64_t size = (batch + n - 1) / n;
  std::vector<MicroBatch> pieces;
  for (std::int64_t first = 0; first < batch; first += size) {
    pieces.push_back({BatchSlice{first, 1}, std::min(size, batch - first)});
  }
  return pieces;
}

}  // namespace shardbook
