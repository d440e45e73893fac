#include "chapters/03_zero_fsdp/zero/zero_offload.h"

#include "core/context.h"
#include "core/inplace.h"

namespace shardbook::zero {

void copy_across(const Tensor& target, const Tensor& source,
                 HostTraffic& traffic) {
  begin_copy(target, source, traffic).wait();
}

Event begin_copy(const Tensor& target, const Tensor& source,
                 HostTraffic& traffic) {
  Event done;
  if (target.device() == source.device()) {
    target.copy_from(source);
    return done;
  }
  Event issued;
  issued.record();
  {
    StreamScope scope(kCopyStream);
    issued.wait();
    target.copy_from(source);
    done.record();
  }
  const bool to_host = target.device() == RankContext::current().host();
  (to_host ? traffic.to_host : traffic.to_device) += source.bytes();
  return done;
}

void take_runs(const std::vector<CopyRun>& runs, bool accumulates,
               HostTraffic& traffic) {
  if (runs.empty()) return;
  if (runs[0].target.device() == runs[0].source.device()) {
    accumulates ? add_runs(runs) : copy_runs(runs);
    return;
  }
  for (const CopyRun& run : runs) {
    if (!accumulates) {
      copy_across(run.target, run.source, traffic);
      continue;
    }
    MemoryScope kind(MemoryKind::kGradient);
    const Tensor beside = run.target.empty_like();
    copy_across(beside, run.source, traffic);
    add_into(run.target, beside);
  }
}

}  // namespace shardbook::zero
