#include "bench/validate/attention_time.h"

#include <algorithm>

#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/planner/on_shapes.h"
#include "core/autograd.h"
#include "core/context.h"
#include "sim/virtual_clock.h"

namespace shardbook::validate {

planner::StepTime run_attention(const AttentionJob& job) {
  planner::StepTime time;
  const auto body = [&](ProcessGroup& cp) {
    sequence_parallel::RingOptions options;
    options.attention.heads = job.heads;
    options.attention.kv_heads = job.kv_heads;
    options.layout = job.layout;
    const auto tensor = [&](std::int64_t heads) {
      return Tensor::zeros({1, job.tokens_per_rank, heads * job.head_dim},
                           {job.dtype, Device()});
    };
    const Tensors qkv = {tensor(job.heads), tensor(job.kv_heads),
                         tensor(job.kv_heads)};
    for (const Tensor& each : qkv) {
      if (job.with_backward) each.set_requires_grad();
    }
    const Tensor dout = tensor(job.heads);
    sim::VirtualClock& clock = *sim::VirtualClock::current();
    clock.begin_steps();
    const Tensor out =
        sequence_parallel::ring_attention(qkv[0], qkv[1], qkv[2], options, cp);
    if (job.with_backward) {
      const PhaseScope phase(Phase::kBackward);
      autograd::backward({out}, {dout});
    }
    // Ranks take turns on one thread
    time.seconds = std::max(time.seconds, clock.now_s());
    time.trust = std::max(time.trust, clock.trust());
  };
  planner::on_shapes(
      job.cluster, job.ranks, [](int rank) { return rank; }, body);
  return time;
}

}  // namespace shardbook::validate
