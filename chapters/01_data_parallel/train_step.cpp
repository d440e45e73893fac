#include "chapters/01_data_parallel/train_step.h"

#include "core/context.h"

namespace shardbook::data_parallel {

StepResult train_step(const Options& options, DataParallel& model,
                      Optimizer& optimizer, const Dataset& data,
                      std::int64_t step) {
  // Forward: the whole batch goes in and the whole output comes out, on main.
  const Batch batch = data.batch(step, options.batch);
  RankContext::current().random.batch = batch.slice;
  RankContext::current().random.next_op = 0;
  const Tensor loss = language_loss(model(batch.inputs), batch.targets);
  StepResult result;
  result.loss = loss.item();

  // Backward: the replicas' gradients arrive on main as one sum.
  loss.backward();

  // Step on main; the next forward sends the new weights out again.
  const Tensors& parameters = optimizer.parameters();
  result.grad_norm = options.clip > 0
                         ? clip_grad_norm(parameters, options.clip)
                         : grad_norm(parameters);
  optimizer.step();
  for (const Tensor& parameter : parameters) parameter.clear_grad();
  return result;
}

}  // namespace shardbook::data_parallel
