#include "chapters/03_zero_fsdp/zero_offload.h"

#include "core/context.h"
#include "core/inplace.h"
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
  add_into(target, beside);
}

}  // namespace shardbook::zero
