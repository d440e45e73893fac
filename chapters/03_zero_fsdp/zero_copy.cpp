#include "chapters/03_zero_fsdp/zero_copy.h"

#include <functional>

#include "core/check.h"
#include "core/context.h"
#include "core/kernels/elementwise.h"

namespace shardbook::zero {
namespace {

void fused(const char* name, const std::vector<CopyRun>& runs,
           double passes,  // arrays read and written per run
           const std::function<void(KernelContext&, const CopyRun&)>& kernel) {
  if (runs.empty()) return;
  RankContext& context = RankContext::current();
  const Tensor& first = runs[0].target;
  OpEvent event;
  event.name = name;
  event.flops = 0;
  event.bytes = 0;
  event.phase = context.phase;
  event.device = first.device();
  event.dtype = first.dtype();
  event.stream = context.stream;
  for (const CopyRun& run : runs) {
    SB_CHECK(run.target.numel() == run.source.numel() &&
                 run.target.dtype() == run.source.dtype() &&
                 run.target.device() == run.source.device() &&
                 run.target.device() == first.device(),
             name, ": runs of ", run.source.numel(), " and ",
             run.target.numel(), " elements, ", dtype_name(run.source.dtype()),
             " and ", dtype_name(run.target.dtype()),
             "; both sides must agree, devices too");
    event.flops += static_cast<double>(run.target.numel());
    event.bytes += passes * static_cast<double>(run.target.bytes());
  }
  context.notify_op_begin(event);
  for (const CopyRun& run : runs) {
    if (run.target.is_meta() || run.target.numel() == 0) continue;
    kernel(context.kernels(), run);
  }
  context.notify_op_end(event);
}

}  // namespace

void copy_runs(const std::vector<CopyRun>& runs, double factor) {
  fused("copy_runs", runs, 2,
        [factor](KernelContext& context, const CopyRun& run) {
          const Tensor& to = run.target;
          if (factor == 1) {
            kernels::cast(context, to.dtype(), run.source.raw(), to.dtype(),
                          to.raw(), to.numel());
          } else {
            kernels::scale(context, to.dtype(), to.numel(), factor,
                           run.source.raw(), to.raw());
          }
        });
}

void add_runs(const std::vector<CopyRun>& runs) {
  fused("add_runs", runs, 3, [](KernelContext& context, const CopyRun& run) {
    kernels::axpy(context, run.target.dtype(), run.target.numel(), 1,
                  run.source.raw(), run.target.raw());
  });
}

}  // namespace shardbook::zero
