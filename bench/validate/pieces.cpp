#include "bench/validate/pieces.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "chapters/07_tensor_parallel/layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "sim/cost_model.h"
#include "sim/virtual_clock.h"
#include "sim/world.h"

namespace shardbook::validate {
namespace {

using PieceBody = std::function<void(ProcessGroup& group)>;

void on_shapes(const sim::Cluster& cluster, int ranks, const PieceBody& body,
               const std::function<int(int rank)>& fold_class) {
  sim::WorldOptions world;
  world.launch.backend = "sim";
  world.cost = std::make_shared<const sim::CostModel>(cluster);
  world.fold_class = fold_class;
  world.num_recorded_ranks = 0;
  sim::run_world(ranks, body, world);
}

/// A tensor that no activation is counted for: a gradient to begin with.
Tensor given(const Shape& shape, DType dtype) {
  const MemoryScope kind(MemoryKind::kInput);
  return Tensor::zeros(shape, {dtype, Device()});
}

void run_backward(const Tensor& y, const Tensor& dy) {
  const PhaseScope phase(Phase::kBackward);
  autograd::backward({y}, {dy});
}

LayerRun run_rank(const LayerJob& job, ProcessGroup& tp) {
  ModelConfig config;
  config.n_embd = job.hidden;
  config.n_head = job.heads;
  config.n_positions = job.seq;
  config.n_layer = 1;
  config.dropout = job.dropout;
  sequence_parallel::MegatronOptions how;
  how.recompute_attention = job.recompute_attention;
  const LayerFactory layers =
      job.cuts_tokens ? sequence_parallel::megatron_layers(config, tp, how)
                      : tensor_parallel::layers(config, tp);
  InitOptions init;
  init.dtype = job.dtype;
  GptBlock layer("layer", config, init, layers);
  layer.recompute = job.recompute;

  const std::int64_t tokens = job.cuts_tokens ? job.seq / tp.size() : job.seq;
  const Shape shape = {job.micro_batch, tokens, job.hidden};
  const Tensor dy = given(shape, job.dtype);
  const Tensor x = Tensor::zeros(shape, {job.dtype, Device()});
  x.set_requires_grad();  // it comes from the layer below

  sim::VirtualClock& clock = *sim::VirtualClock::current();
  clock.begin_steps();
  LayerRun run;
  const Tensor y = layer(x);
  run.forward_s = clock.now_s();
  // The output belongs to the layer above
  const Device& device = RankContext::current().device;
  run.kept_bytes = static_cast<double>(
      device.memory().current(MemoryKind::kActivation) -
      y.numel() * static_cast<std::int64_t>(dtype_bytes(job.dtype)));
  run_backward(y, dy);
  run.backward_s = clock.now_s() - run.forward_s;
  run.trust = clock.trust();
  return run;
}

}  // namespace

LayerRun run_layer(const LayerJob& job) {
  SB_CHECK(job.seq % job.ranks == 0 || !job.cuts_tokens, "sequences of ",
           job.seq, " tokens do not divide by ", job.ranks, " ranks");
  SB_CHECK(job.cuts_tokens || !job.recompute_attention,
           "attention alone is recomputed only where tokens are cut");
  LayerRun run;
  on_shapes(
      job.cluster, job.ranks,
      [&](ProcessGroup& tp) {
        const LayerRun mine = run_rank(job, tp);
        if (tp.rank() == 0) run = mine;
      },
      [](int) { return 0; });
  return run;
}

AttentionRun run_attention(const AttentionJob& job) {
  AttentionRun run;
  on_shapes(
      job.cluster, job.ranks,
      [&](ProcessGroup& cp) {
        sequence_parallel::RingOptions options;
        options.attention.heads = job.heads;
        options.attention.kv_heads = job.kv_heads;
        options.layout = job.layout;
        const auto tensor = [&](std::int64_t heads) {
          const Tensor x =
              given({1, job.tokens_per_rank, heads * job.head_dim}, job.dtype);
          if (job.with_backward) x.set_requires_grad();
          return x;
        };
        const Tensor q = tensor(job.heads);
        const Tensor k = tensor(job.kv_heads);
        const Tensor v = tensor(job.kv_heads);
        const Tensor dout = given(q.shape(), job.dtype);
        sim::VirtualClock& clock = *sim::VirtualClock::current();
        clock.begin_steps();
        const Tensor out =
            sequence_parallel::ring_attention(q, k, v, options, cp);
        if (job.with_backward) run_backward(out, dout);
        // Ranks take turns on one thread
        run.seconds = std::max(run.seconds, clock.now_s());
        run.trust = std::max(run.trust, clock.trust());
      },
      [](int rank) { return rank; });
  return run;
}

}  // namespace shardbook::validate
