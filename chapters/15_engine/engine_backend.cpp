// The engine under an Accelerator: the config clips, and backward ends in the
// engine's step.

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/backend.h"

namespace shardbook::accelerate::internal {
namespace {

class UnderEngine : public Backend {
 public:
  UnderEngine(const Plan& plan, const engine::DeepSpeedConfig& config) {
    engine::InitializeArgs args;
    if (!plan.optimizer.type.empty()) args.optimizer = plan.optimizer;
    engine_ = engine::initialize(plan.module, config, plan.world, args).engine;
    engine_->set_gradient_accumulation_boundary(true);
  }

  void begin_micro_step(bool syncs) override {
    engine_->set_gradient_accumulation_boundary(syncs);
  }
  void end_micro_step() override {
    engine_->set_gradient_accumulation_boundary(true);
  }
  Tensor forward(const Tensor& inputs) override { return (*engine_)(inputs); }
  // The engine divides by gradient_accumulation_steps, clips as its config
  // says, updates and forgets the gradients
  void backward(const Tensor& loss) override {
    engine_->backward(loss);
    engine_->step();
  }
  double clip(double) override { return engine_->get_global_grad_norm(); }
  void step() override {}
  void zero_grad() override {}
  bool was_skipped() const override { return !engine_->was_step_applied(); }
  bool owns_schedule() const override {
    return !engine_->config().scheduler.type.empty();
  }

  Optimizer& optimizer() override { return engine_->optimizer(); }
  Tensors parameters() override { return engine_->module().parameters(); }
  Module& module() override { return engine_->module(); }
  ProcessGroup& data_group() override { return engine_->data_parallel_group(); }
  std::vector<NamedTensor> full_state() override {
    return engine_->full_state();
  }
  TrainingState state() override { return engine_->state(); }
  std::map<std::string, double> numbers() const override {
    return engine_->numbers();
  }
  void set_numbers(const std::map<std::string, double>& numbers) override {
    // Other plugins do not count them
    if (numbers.count("global_steps") > 0) engine_->set_numbers(numbers);
  }

 private:
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace

std::unique_ptr<Backend> make_engine(const Plan& plan,
                                     const engine::DeepSpeedConfig& config) {
  return std::make_unique<UnderEngine>(plan, config);
}

}  // namespace shardbook::accelerate::internal
