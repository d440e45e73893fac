#include "core/copy_runs.h"

#include <cstddef>
#include <functional>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/op_scope.h"
#include "core/internal/transfers.h"
#include "core/kernels/elementwise.h"

namespace shardbook {
namespace {

// One piece of a run.
struct Piece {
  DType from, dtype;  // of the source, of the target
  std::int64_t numel;
  const void* source;
  void* target;
};

void check_run(const char* name, const CopyRun& run, const Device& device) {
  const bool has_pieces = run.numel > 0;
  const DType from = run.source.dtype(), to = run.target.dtype();
  SB_CHECK((has_pieces || run.target.numel() == run.source.numel()) &&
               (from == to || (dtype_bytes(from) == 2 && to == DType::kF32)) &&
               run.target.device() == run.source.device() &&
               run.target.device() == device,
           name, ": runs of ", run.source.numel(), " and ", run.target.numel(),
           " elements, ", dtype_name(from), " and ", dtype_name(to),
           "; both sides must agree, devices too");
  const std::int64_t last = run.count - 1;
  SB_CHECK(!has_pieces ||
               (last * run.target_stride + run.numel <= run.target.numel() &&
                last * run.source_stride + run.numel <= run.source.numel()),
           name, ": ", run.count, " pieces of ", run.numel,
           " elements reach beyond the end");
}

std::int64_t numel_of(const CopyRun& run) {
  return run.numel == 0 ? run.target.numel() : run.count * run.numel;
}

void fused(const char* name, const std::vector<CopyRun>& runs,
           double passes,  // arrays read and written per run
           double counted,
           const std::function<void(KernelContext&, const Piece&)>& kernel) {
  if (runs.empty()) return;
  RankContext& context = RankContext::current();
  const Tensor& first = runs[0].target;
  double flops = 0;
  for (const CopyRun& run : runs) {
    check_run(name, run, first.device());
    flops += static_cast<double>(numel_of(run));
  }
  if (counted >= 0) flops = counted;
  const internal::OpScope scope(
      name, flops,
      passes * flops * static_cast<double>(dtype_bytes(first.dtype())), first);
  for (const CopyRun& run : runs) {
    if (run.target.is_meta() || numel_of(run) == 0) continue;
    const DType from = run.source.dtype(), to = run.target.dtype();
    const auto source_element = static_cast<std::int64_t>(dtype_bytes(from));
    const auto element = static_cast<std::int64_t>(dtype_bytes(to));
    const auto* source = static_cast<const std::byte*>(run.source.raw());
    auto* target = static_cast<std::byte*>(run.target.raw());
    for (std::int64_t i = 0; i < run.count; ++i) {
      kernel(context.kernels(run.target.device()),
             {from, to, numel_of(run) / run.count,
              source + i * run.source_stride * source_element,
              target + i * run.target_stride * element});
    }
  }
}

}  // namespace

void copy_runs(const std::vector<CopyRun>& runs, double factor,
               double counted) {
  fused("copy_runs", runs, 2, counted,
        [factor](KernelContext& context, const Piece& piece) {
          if (factor == 1) {
            kernels::cast(context, piece.from, piece.source, piece.dtype,
                          piece.target, piece.numel);
          } else {
            SB_CHECK(piece.from == piece.dtype, "copy_runs: factor ", factor,
                     " from ", dtype_name(piece.from), " to ",
                     dtype_name(piece.dtype), "; give equal dtypes");
            kernels::scale(context, piece.dtype, piece.numel, factor,
                           piece.source, piece.target);
          }
        });
}

void add_runs(const std::vector<CopyRun>& runs, double counted) {
  fused("add_runs", runs, 3, counted,
        [](KernelContext& context, const Piece& piece) {
          if (piece.from == piece.dtype) {
            kernels::axpy(context, piece.dtype, piece.numel, 1, piece.source,
                          piece.target);
            return;
          }
          const Scratch wide(context, static_cast<std::size_t>(piece.numel) *
                                          dtype_bytes(piece.dtype));
          kernels::cast(context, piece.from, piece.source, piece.dtype,
                        wide.data(), piece.numel);
          kernels::axpy(context, piece.dtype, piece.numel, 1, wide.data(),
                        piece.target);
        });
}

ManyCopies::ManyCopies(const char* name, const Tensor& to, const Tensor& from)
    : context_(RankContext::current()), to_(to), from_(from) {
  event_.name = name;
  event_.flops = 0;
  event_.bytes = internal::bytes_of({&to, &from});
  event_.phase = context_.phase;
  event_.device = to.device();
  event_.dtype = to.dtype();
  event_.stream = context_.stream;
  context_.notify_op_begin(event_);
}

ManyCopies::~ManyCopies() { context_.notify_op_end(event_); }

void ManyCopies::copy(std::int64_t to, std::int64_t from,
                      std::int64_t n) const {
  if (to_.is_meta() || n == 0) return;
  internal::copy_elements(to_.flat_view(to, {n}), from_.flat_view(from, {n}));
}

}  // namespace shardbook
