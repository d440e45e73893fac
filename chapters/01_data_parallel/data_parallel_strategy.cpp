#include "chapters/01_data_parallel/data_parallel_strategy.h"

#include "chapters/01_data_parallel/bill.h"
#include "chapters/common/models/checkpoint.h"
#include "core/context.h"

namespace shardbook::data_parallel {

DataParallelStrategy::DataParallelStrategy(const Options& options,
                                           const std::vector<Device>& devices)
    : options_(options),
      loaded_(build_model(options)),
      data_(Dataset::open(options, loaded_.config)),
      optimizer_(make_optimizer(options.optimizer, loaded_.model->parameters(),
                                options.optimizer_options)),
      model_(*loaded_.model, devices) {}

StepResult DataParallelStrategy::step(std::int64_t step) {
  // Forward: the whole batch goes in and the whole output comes out, on main.
  const Batch batch = data_.batch(step, options_.batch);
  RankContext::current().random.batch = batch.slice;
  RankContext::current().random.next_op = 0;
  const Tensor loss = language_loss(model_(batch.inputs), batch.targets);
  for (const Device& device : model_.device_ids()) {
    device.note_held(MemoryKind::kActivation);
    device.note_held(MemoryKind::kParameter);  // its replica's
  }
  StepResult result;
  result.loss = loss.item();

  // Backward: the replicas' gradients arrive on main as one sum.
  loss.backward();

  // Step on main; the next forward sends the new weights out again.
  result.grad_norm = update_parameters(options_, *optimizer_);
  return result;
}

std::vector<Bill> DataParallelStrategy::bills() {
  const auto traffic = step_traffic(options_, loaded_.config);
  const auto memory = memory_bills(options_, loaded_.config, *loaded_.model);
  const double seconds = step_s(options_, loaded_.config, *loaded_.model);
  std::vector<Bill> bills;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    bills.push_back({traffic[i].total() * static_cast<double>(options_.steps),
                     memory[i], seconds});
  }
  return bills;
}

TrainingState DataParallelStrategy::state() {
  TrainingState state;
  add_whole(state, state_of(*loaded_.model), *optimizer_);
  return state;
}

std::vector<NamedTensor> DataParallelStrategy::full_state() {
  return state_of(*loaded_.model);
}

}  // namespace shardbook::data_parallel
