// The run on one device that every chapter is compared with.

#include <cmath>
#include <optional>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/replica_sums.h"
#include "chapters/common/run/training.h"
#include "core/layers.h"

namespace shardbook {
ReferenceRun train_one_device(const Options& options,
                              std::int64_t num_micro_batches) {
  return train_one_device(
      options, strided_micro_batches(options.batch, num_micro_batches));
}

ReferenceRun train_one_device(const Options& options,
                              const std::vector<MicroBatch>& pieces,
                              const OneDevice& setup) {
  Options quiet = options;
  quiet.log.clear();
  const LoadedModel loaded = build_model(quiet);
  if (setup.defers_statistics) defer_batch_norms(*loaded.model);
  const Dataset data = Dataset::open(options, loaded.config);
  const auto optimizer = make_optimizer(
      options.optimizer, loaded.model->parameters(), options.optimizer_options);
  std::optional<DynamicLossScaler> scaler;
  if (setup.scaler != nullptr) scaler = *setup.scaler;
  const double copies = setup.averages_replicas ? setup.replicas : 1;
  ReplicaSums sums(loaded.model->parameters(), 1 / copies);
  const std::size_t each =
      pieces.size() / static_cast<std::size_t>(setup.replicas);
  std::size_t next = 0;
  return train_yardstick(
      quiet, *optimizer,
      setup.defers_statistics ? state_of(*loaded.model)
                              : loaded.model->named_parameters(),
      [&](std::int64_t step) {
        StepResult result;
        result.loss = accumulate_gradients(
            quiet, *loaded.model, data, step, pieces,
            copies * (scaler ? scaler->scale() : 1),
            [&](const Tensor& logits, const Tensor& targets) {
              // The first loss of a replica ends the replica before it
              if (setup.replicas > 1 && next % each == 0) {
                sums.take(next / each);
              }
              ++next;
              return language_loss(logits, targets);
            });
        if (setup.replicas > 1) {
          sums.take(next / each);
          sums.give();
        }
        result.grad_norm = scaler ? update_unscaled(quiet, *optimizer, *scaler)
                                  : update_parameters(quiet, *optimizer);
        result.was_skipped = scaler && !std::isfinite(result.grad_norm);
        return result;
      });
}

}  // namespace shardbook
