#include "chapters/03_zero_fsdp/zero_offload.h"

#include "core/context.h"
#include "core/kernels/elementwise.h"
#include "core/stream.h"

namespace shardbook::zero {

void copy_across(const Tensor& target, const Tensor& source,
                 HostTraffic& traffic) {
  if (target.device() == source.device()) {
    target.copy_from(source);
    return;
  }
  Event issued;
  issued.record();
  Event done;
  {
    StreamScope scope(kCopyStream);
    issued.wait();
    target.copy_from(source);
    done.record();
  }
  done.wait();
  const bool to_host = target.device() == RankContext::current().host();
  (to_host ? traffic.to_host : traffic.to_device) += source.bytes();
}

namespace {

// target += source, in place; one operation to the observers.
void add_in_place(const Tensor& target, const Tensor& source) {
  RankContext& context = RankContext::current();
  OpEvent event{"add",
                static_cast<double>(target.numel()),
                3.0 * static_cast<double>(target.bytes()),
                context.phase,
                target.device(),
                target.dtype(),
                {},
                context.stream,
                Device()};
  context.notify_op_begin(event);
  if (!target.is_meta()) {
    kernels::axpy(context.kernels(), target.dtype(), target.numel(), 1,
                  source.raw(), target.raw());
  }
  context.notify_op_end(event);
}

}  // namespace

void take(const Tensor& target, const Tensor& source, bool accumulates,
          HostTraffic& traffic) {
  if (!accumulates) {
    copy_across(target, source, traffic);
    return;
  }
  Tensor beside = source;
  if (target.device() != source.device()) {
    MemoryScope kind(MemoryKind::kGradient);
    beside = target.empty_like();
    copy_across(beside, source, traffic);
  }
  add_in_place(target, beside);
}

}  // namespace shardbook::zero
