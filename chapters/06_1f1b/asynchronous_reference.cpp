#include "chapters/06_1f1b/asynchronous_reference.h"

#include <algorithm>
#include <deque>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "core/inplace.h"

namespace shardbook::pipeline {
namespace {

/// A stage, its earlier weights, and its own optimizer.
struct StageHistory {
  std::unique_ptr<Stage> stage;
  std::unique_ptr<Optimizer> optimizer;
  std::deque<Tensors> versions;  ///< the first one is version `oldest`
  int oldest = 0;
  int updates = 0;

  const Tensors& parameters() const { return optimizer->parameters(); }
  void push() {
    Tensors copies;
    for (const Tensor& each : parameters()) copies.push_back(each.clone());
    versions.push_back(std::move(copies));
  }
  void load(int version) {
    const Tensors& from = versions[static_cast<std::size_t>(version - oldest)];
    for (std::size_t i = 0; i < from.size(); ++i) {
      parameters()[i].copy_from(from[i]);
    }
  }
  /// Drops versions that are never read again.
  void forget_before(int version) {
    while (oldest < version) {
      versions.pop_front();
      ++oldest;
    }
  }
};

/// Updates a stage at the end of step `step`.
void update(const Options& options, const LrSchedule& rate, std::int64_t step,
            int replicas, StageHistory* history) {
  history->load(history->updates);
  for (const Tensor& each : history->parameters()) {
    if (replicas > 1) scale_in_place(each.grad(), 1.0 / replicas);
  }
  history->optimizer->set_lr(options.optimizer_options.lr * rate(step));
  history->optimizer->step();
  for (const Tensor& each : history->parameters()) each.clear_grad();
  history->push();
  history->updates += 1;
}

}  // namespace

int pipedream_version(int micro_batch, int stage,
                      const std::vector<int>& replicas) {
  const auto s = static_cast<std::size_t>(stage);
  int behind = 0;
  for (std::size_t i = s + 1; i < replicas.size(); ++i) behind += replicas[i];
  const int own = replicas[s];
  return std::max(0, micro_batch / own - (behind + own - 1) / own);
}

int vertical_sync_version(int micro_batch, int stage,
                          const std::vector<int>& replicas) {
  const int seen = replicas[0] * pipedream_version(micro_batch, 0, replicas);
  return seen / replicas[static_cast<std::size_t>(stage)];
}

int double_buffered_version(int micro_batch, int micro_batches) {
  return std::max(0, micro_batch / micro_batches - 1);
}

ReferenceRun train_sequentially(const Options& options, const LayerList& layers,
                                const SequentialRule& rule,
                                const std::vector<MicroBatch>& pieces,
                                const Dataset& data) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  std::vector<StageHistory> stages(rule.cuts.size() - 1);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    stages[s].stage =
        std::make_unique<Stage>(layers, rule.cuts[s], rule.cuts[s + 1], init);
    if (!options.load.empty()) {
      load_model(options.load, *stages[s].stage, model_config(options));
    }
    nudge(options, stages[s].stage->parameters());
    stages[s].optimizer =
        make_optimizer(options.optimizer, stages[s].stage->parameters(),
                       options.optimizer_options);
    stages[s].push();
  }
  const LrSchedule rate =
      make_schedule(options.lr_schedule, options.warmup, options.steps);
  LanguageFeed feed(options, data, pieces);
  const int m = static_cast<int>(pieces.size());
  RandomState& random = RankContext::current().random;
  random.seed = options.seed;

  ReferenceRun run;
  for (int b = 0; b < m * options.steps; ++b) {
    const Piece piece = feed.piece(b);
    random.step = piece.step;
    random.batch = piece.slice;
    random.next_op = 0;
    Tensors values = feed.inputs(b);
    for (std::size_t s = 0; s < stages.size(); ++s) {
      const int version = rule.version(static_cast<int>(s), b);
      stages[s].forget_before(version);
      stages[s].load(version);
      values = (*stages[s].stage)(values);
    }
    const Tensor loss = feed.loss(b, values);
    if (b % m == 0) run.losses.push_back(0);
    run.losses.back() += loss.item() * piece.share;
    autograd::backward({loss}, {Tensor::full({}, piece.share, loss.options())});
    if ((b + 1) % m != 0) continue;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      const int replicas = rule.replicas[s];
      if ((b / m + 1) % replicas != 0) continue;
      update(options, rate, b / m, replicas, &stages[s]);
    }
  }
  random.batch = BatchSlice{};
  for (StageHistory& each : stages) {
    each.load(each.updates);
    for (const NamedTensor& p : each.stage->named_parameters()) {
      run.parameters.push_back(p);
    }
    for (const NamedTensor& p : each.stage->named_buffers()) {
      run.parameters.push_back(p);
    }
  }
  return run;
}

}  // namespace shardbook::pipeline
