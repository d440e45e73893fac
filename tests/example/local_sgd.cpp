// A chapter in one file: local SGD. Every rank takes steps of its own on its
// samples; every h-th step, the ranks average their parameters.
//
//   local_sgd --world-size 4 --average-every 3
//
// Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1.

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "core/inplace.h"

using namespace shardbook;

namespace {

class LocalSgd : public Strategy {
 public:
  LocalSgd(const Options& options, std::int64_t every, ProcessGroup& dp)
      : options_(options),
        every_(every),
        dp_(dp),
        loaded_(build_model(options)),
        data_(Dataset::open(options, loaded_.config)),
        optimizer_(make_optimizer(options.optimizer,
                                  loaded_.model->parameters(),
                                  options.optimizer_options)) {
    check_even_batch(options, dp.size(), 1, "--world-size");
  }

  StepResult step(std::int64_t step) override {
    StepResult result;
    result.loss =
        data_parallel_gradients(
            options_, dp_, data_, step, 1, [](bool) {},
            [&](const Tensor& inputs) { return (*loaded_.model)(inputs); })
            .item();
    update_parameters(options_, *optimizer_);
    if ((step + 1) % every_ != 0) return result;

    // Average the parameters where they lie
    const MemoryScope kind(MemoryKind::kCommunication);
    for (const Tensor& each : loaded_.model->parameters()) {
      dp_.all_reduce(each, ReduceOp::kSum, "average").wait();
      scale_into(each, each, 1.0 / dp_.size());
    }
    return result;
  }
  Optimizer& optimizer() override { return *optimizer_; }

  // A ring sends each byte 2 (d - 1) / d times: a loss per step, and the
  // parameters every h steps. One f64 of loss is all that messages need.
  std::vector<Bill> bills() override {
    const double d = dp_.size(), all = 2 * (d - 1) / d;
    double parameters = 0;
    for (const Tensor& each : loaded_.model->parameters()) {
      parameters += static_cast<double>(each.bytes());
    }
    Bill bill;
    bill.bytes =
        all * (8 * static_cast<double>(options_.steps) +
               parameters * static_cast<double>(options_.steps / every_));
    bill.memory = single_device_bill(options_, loaded_.config,
                                     options_.batch / dp_.size());
    return {bill};
  }

  std::vector<NamedTensor> full_state() override {
    if (dp_.rank() != 0) return {};
    return state_of(*loaded_.model);
  }

 private:
  Options options_;
  std::int64_t every_;
  ProcessGroup& dp_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<Optimizer> optimizer_;
};

// One device that plays all ranks, one after another.
ReferenceRun train_in_turns(const Options& options, std::int64_t every) {
  const std::int64_t d = options.world_size;
  std::vector<LoadedModel> models;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (std::int64_t r = 0; r < d; ++r) {
    models.push_back(build_model(options));
    optimizers.push_back(make_optimizer(options.optimizer,
                                        models.back().model->parameters(),
                                        options.optimizer_options));
    nudge(options, optimizers.back()->parameters());
  }
  const Dataset data = Dataset::open(options, models[0].config);
  ReferenceRun run;
  for (std::int64_t k = 0; k < options.steps; ++k) {
    double loss = 0;
    for (std::size_t r = 0; r < models.size(); ++r) {
      const MicroBatch own{{static_cast<std::int64_t>(r), d},
                           options.batch / d};
      loss += accumulate_gradients(options, *models[r].model, data, k, {own},
                                   static_cast<double>(d));
      update_parameters(options, *optimizers[r]);
    }
    run.losses.push_back(loss);
    if ((k + 1) % every != 0) continue;
    for (std::size_t i = 0; i < optimizers[0]->parameters().size(); ++i) {
      const Tensor& sum = optimizers[0]->parameters()[i];
      for (std::size_t r = 1; r < models.size(); ++r) {
        add_into(sum, optimizers[r]->parameters()[i]);
      }
      scale_into(sum, sum, 1.0 / static_cast<double>(d));
      for (std::size_t r = 1; r < models.size(); ++r) {
        optimizers[r]->parameters()[i].copy_from(sum);
      }
    }
  }
  run.parameters = models[0].model->named_parameters();
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    Options options;
    options.chapter = "local_sgd";
    options.optimizer = "sgd";
    std::int64_t every = 4;
    CommandLine line("local_sgd", "Local SGD: steps alone, then an average.");
    add_shared_options(line, options);
    line.add("--average-every", &every, "steps between two averages", 1);
    line.parse(argc, argv);
    check_options(options);
    refuse_image_models(options, kBatchNormDiffers);

    ChapterRun chapter;
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
      LocalSgd strategy(options, every, mesh.group("dp"));
      run.train(options, strategy);
    };
    chapter.reference = [&](const Options& options) {
      return train_in_turns(options, every);
    };
    return run_program(options, line, chapter);
  });
}
