// 3D parallelism on one screen: two stages, two replicas and two ranks per
// layer. The three strategies know nothing of each other; each has its own
// groups.
//
//   ./shardbook lesson hybrid_3d
// Needed: 03_zero_fsdp, 06_1f1b, 07_tensor_parallel. Next: 15_engine.

#include "chapters/02_ddp/lesson.cpp"
#include "chapters/06_1f1b/lesson.cpp"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "comm/device_mesh.h"

namespace shardbook::hybrid {

// --- the strategy
/// Trains one step of this rank: its stage, its replica, its part of the
/// layers.
inline Tensor forward_backward(Stage& stage, const LossFunction& loss_of,
                               ProcessGroup* ends, int step, DeviceMesh& mesh) {
  // tp: every layer computes on a part; its messages are inside of the layer
  // dp: each replica reads its own samples
  const Batch batch =
      lesson::batch(step, mesh.coordinate("dp"), mesh.size("dp"));
  // pp: the stages of one replica pass on micro-batches
  const Tensor loss =
      pipeline::run_stages(stage, batch, mesh.group("pp"), loss_of);
  pipeline::sum_tied(stage, ends);
  // dp: the replicas of one part of one stage average their gradients
  ddp::average_gradients(stage, mesh.group("dp"));
  return loss;
}
// --- end

inline lesson::Result train(ProcessGroup& world) {
  // 1. Neighbours share a layer, since they send most
  const int n = world.size() == 8 ? 2 : 1;
  DeviceMesh mesh(world, Topology({"pp", "dp", "tp"}, {n, n, n}));
  ProcessGroup &tp = mesh.group("tp"), &pp = mesh.group("pp");
  // 2. This rank's part of its stage's layers
  const LayerFactory factory = tensor_parallel::layers(lesson::config(), tp);
  const auto layers = layers_of(lesson::config(), factory, factory);
  const std::vector<int> cuts = cut_uniform(layers->size(), n);
  const auto s = static_cast<std::size_t>(pp.rank());
  Stage stage(*layers, cuts[s], cuts[s + 1], lesson::init());
  const auto optimizer = lesson::sgd(stage.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 3. The three strategies, from the inside out
    const Tensor local = forward_backward(stage, factory.loss,
                                          n > 1 ? &pp : nullptr, step, mesh);
    optimizer->step();
    stage.clear_grad();
    // 4. The loss: the last stage has it, on each rank of tp; a mean over dp
    loss = lesson::mean_over(scale(local, n), mesh.group("pp-dp"));
  }
  const auto layout = [n](const std::string& name, int r) {
    return tensor_parallel::layout(lesson::config(), name, r, n);
  };
  return lesson::count(world, loss)
      .with(lesson::collect(
          world, lesson::join(stage.named_parameters(), layout, tp)));
}

/// Counts ten steps on 2 x 2 x 2 ranks, where an all-reduce of n elements sends
/// n.
inline double bill(int rank, int ranks) {
  if (ranks == 1) return 0;
  const ModelConfig c = lesson::config();
  const bool is_last = rank >= 4;
  const double h = c.n_embd, v = c.vocab_size, s = lesson::sequence();
  const double tokens = lesson::batch_size() / 2 * s, x = tokens * h;
  // tp: four sums per block; the embedding's, or the head's and the loss's
  const double tp = 2 * 4 * x + x + (is_last ? 3 * tokens : 0);
  // pp: an activation or a gradient per micro-batch, and the tied table
  const double pp = x + v * h / 2;
  // dp: the parts of two blocks, of the table, of positions or of the last norm
  const double block = 6 * h * h + 3.5 * h + 6 * h;
  const double dp = 2 * block + v * h / 2 + (is_last ? 2 * h : s * h);
  return lesson::kSteps * (tp + pp + dp + 1.5) * 8;
}

inline lesson::Lesson this_lesson() { return {/*ranks=*/{8}, train, bill}; }

}  // namespace shardbook::hybrid

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::hybrid::this_lesson()); }
#endif
