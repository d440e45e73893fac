#pragma once

// Many small copies as one operation.
//
// A unit of a transformer has a dozen parameters, and each lies in d pieces in
// what an all-gather brings. One launch per piece would cost more than the copy
// itself; devices have kernels that take a list.

#include <cstdint>
#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {

/// target and source: the same dtype and device; runs do not overlap. All of
/// both, or, with `numel`, `count` pieces of so many elements each, one every
/// stride elements from the first element of target and source on.
struct CopyRun {
  Tensor target;
  Tensor source;
  std::int64_t count = 1;
  std::int64_t numel = 0;
  std::int64_t target_stride = 0;
  std::int64_t source_stride = 0;
};

/// target = factor * source for every run; one operation to the observers, of
/// as many elements as it has, or of `counted` elements.
void copy_runs(const std::vector<CopyRun>& runs, double factor = 1,
               double counted = -1);

/// target += source for every run; the same to the observers.
void add_runs(const std::vector<CopyRun>& runs, double counted = -1);

/// Many pieces of one array to places in another, as one operation that lasts
/// as long as this object; converts. Both arrays outlive it.
class ManyCopies {
 public:
  ManyCopies(const char* name, const Tensor& to, const Tensor& from);
  ~ManyCopies();
  ManyCopies(const ManyCopies&) = delete;
  ManyCopies& operator=(const ManyCopies&) = delete;

  /// n elements, from element `from` on to element `to` on.
  void copy(std::int64_t to, std::int64_t from, std::int64_t n) const;

 private:
  RankContext& context_;
  const Tensor &to_, &from_;
  OpEvent event_{};
};

}  // namespace shardbook
