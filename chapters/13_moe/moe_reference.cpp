#include "chapters/13_moe/moe_reference.h"

#include <cmath>

#include "chapters/common/models/checkpoint.h"

namespace shardbook::moe {

std::unique_ptr<Gpt> build_gpt(const Options& options,
                               const ModelConfig& config,
                               const LayerFactory& layers) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  return std::make_unique<Gpt>(config, init, layers);
}

ReferenceRun train_reference(const Options& options, const LayerFactory& layers,
                             MoeRecord& record,
                             const std::vector<MicroBatch>& pieces, int groups,
                             DynamicLossScaler scaler) {
  Options quiet = options;
  quiet.log.clear();
  const ModelConfig config = model_config(options);
  const auto model = build_gpt(options, config, layers);
  if (!options.load.empty()) load_model(options.load, *model);
  const Dataset data = Dataset::open(options, config);
  const auto optimizer = make_optimizer(options.optimizer, model->parameters(),
                                        options.optimizer_options);
  const double parts = static_cast<double>(pieces.size()) * groups;
  return train_yardstick(
      quiet, *optimizer, model->named_parameters(), [&](std::int64_t step) {
        StepResult result;
        record.loss_scale = scaler.scale() / parts;
        result.loss = accumulate_gradients(quiet, *model, data, step, pieces,
                                           scaler.scale());
        result.grad_norm = options.dtype == DType::kF16
                               ? update_unscaled(quiet, *optimizer, scaler)
                               : update_parameters(quiet, *optimizer);
        result.was_skipped =
            options.dtype == DType::kF16 && !std::isfinite(result.grad_norm);
        return result;
      });
}

LoadedModel whole_model(const Options& options, const MoeOptions& moe,
                        const std::vector<NamedTensor>& state) {
  LayerFactory layers;
  layers.mlp = moe_mlp(moe, {}, std::make_shared<MoeRecord>());
  LoadedModel loaded;
  loaded.config = model_config(options);
  loaded.config.has_experts = most_experts(moe) > 1;
  loaded.model = build_gpt(options, loaded.config, layers);
  loaded.model->load_values(state);
  return loaded;
}

}  // namespace shardbook::moe
