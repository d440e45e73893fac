#pragma once

// Many small copies as one operation.
//
// A unit of a transformer has a dozen parameters, and each lies in d pieces in
// the result of an all-gather. One launch per piece would cost more than the
// copy itself; devices have kernels that take a list.

#include <cstdint>
#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {

/// Copies `source` to `target` on the same device; runs do not overlap. All
/// runs of a call have the same dtypes: equal ones, or a target of f32 and a
/// source of 16 bits. `numel` 0 copies all of it; otherwise there are `count` pieces of
/// `numel` elements, `target_stride` and `source_stride` elements apart.
struct CopyRun {
  Tensor target;
  Tensor source;
  std::int64_t count = 1;
  std::int64_t numel = 0;
  std::int64_t target_stride = 0;
  std::int64_t source_stride = 0;
};

/// target = factor * source for every run; a factor other than 1 needs equal
/// dtypes. Observers see one operation, on the
/// elements of all runs, or on `counted` elements if that is not negative.
void copy_runs(const std::vector<CopyRun>& runs, double factor = 1,
               double counted = -1);

/// target += source for every run; observers see the same.
void add_runs(const std::vector<CopyRun>& runs, double counted = -1);

/// Copies pieces of one array to places in another, and converts them.
/// Observers see one operation, which lasts as long as this object. Both arrays
/// must outlive it.
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
