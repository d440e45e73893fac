// Training steps on images for `./shardbook bench pytorch`.

#include "bench/pytorch_peer.h"
#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"

namespace shardbook::bench {

TimedWork images_work(const PeerOptions& peer, ProcessGroup& world) {
  Options options;
  options.model = peer.model;
  options.data = "random";
  options.image_size = peer.size;
  const ModelConfig config = ModelConfig::read(peer.model);
  struct State {
    std::unique_ptr<Module> model;
    std::unique_ptr<Optimizer> optimizer;
    Batch batch;
  };
  auto state = std::make_shared<State>();
  state->model = make_model(config, InitOptions{});
  OptimizerOptions sgd;
  sgd.lr = 1e-3;
  state->optimizer = make_optimizer("sgd", state->model->parameters(), sgd);
  state->batch =
      Dataset::open(options, config)
          .batch(/*step=*/0, peer.batch, {world.rank(), 1}, peer.batch);
  return {"channels last", [state] {
            state->model->clear_grad();
            language_loss((*state->model)(state->batch.inputs),
                          state->batch.targets)
                .backward();
            state->optimizer->step();
          }};
}

}  // namespace shardbook::bench
