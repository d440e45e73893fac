// Local SGD, a strategy of your own: every rank takes steps alone on its
// samples; every h-th step, the ranks average their parameters.
//
//   local_sgd --world-size 4 --average-every 3
//
// Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1.

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/program.h"
#include "chapters/common/run/textbook.h"
#include "comm/device_mesh.h"
#include "core/inplace.h"

using namespace shardbook;

namespace {

// A model, and the optimizer that updates it.
struct Replica {
  explicit Replica(const Options& options)
      : loaded(build_model(options)),
        optimizer(make_optimizer(options.optimizer, loaded.model->parameters(),
                                 options.optimizer_options)) {}
  Module& model() const { return *loaded.model; }
  const Tensors& parameters() const { return optimizer->parameters(); }
  LoadedModel loaded;
  std::unique_ptr<Optimizer> optimizer;
};

class LocalSgd : public Strategy {
 public:
  LocalSgd(const Options& options, std::int64_t every, ProcessGroup& dp)
      : options_(options),
        every_(every),
        dp_(dp),
        replica_(options),
        data_(Dataset::open(options, replica_.loaded.config)) {}

  // A step: gradients of this rank's samples, an update, perhaps an average.
  StepResult step(std::int64_t step) override {
    const Tensor loss = data_parallel_gradients(
        options_, dp_, data_, step, 1, [](bool) {},
        [&](const Tensor& inputs) { return replica_.model()(inputs); });
    update_parameters(options_, *replica_.optimizer);
    if ((step + 1) % every_ == 0) {
      const MemoryScope kind(MemoryKind::kCommunication);
      for (const Tensor& each : replica_.parameters()) {
        dp_.all_reduce(each, ReduceOp::kSum, "average").wait();
        scale_into(each, each, 1.0 / dp_.size());
      }
    }
    return {loss.item()};
  }
  Optimizer& optimizer() override { return *replica_.optimizer; }

  // The bill: what one rank holds and sends, and the time of the last step.
  std::vector<Bill> bills() override {
    const ModelConfig& config = replica_.loaded.config;
    const double d = dp_.size(), ring = 2 * (d - 1) / d;
    double sent = 0, seconds = 0;  // by one average
    for (const Tensor& each : replica_.parameters()) {
      sent += ring * each.bytes();
      seconds += textbook::all_reduce(d, each.bytes());
    }
    Bill bill;
    bill.memory =
        single_device_bill(options_, config, options_.batch / dp_.size());
    // Each step sends its loss, one f64, while backward runs
    bill.bytes = options_.steps * ring * 8 + options_.steps / every_ * sent;
    if (!textbook::has_model_times(options_, config)) return {bill};
    const auto times =
        textbook::model_times(options_, config, options_.batch / d);
    bill.step_s = times.forward() +
                  std::max(times.backward(), textbook::all_reduce(d, 8));
    if (options_.steps % every_ == 0) bill.step_s += seconds;
    return {bill};
  }

  std::vector<NamedTensor> full_state() override {
    if (dp_.rank() != 0) return {};
    return state_of(replica_.model());
  }

 private:
  Options options_;
  std::int64_t every_;
  ProcessGroup& dp_;
  Replica replica_;
  Dataset data_;
};

// The oracle: one device that plays all ranks, one after another.
ReferenceRun train_in_turns(const Options& options, std::int64_t every) {
  const std::int64_t d = options.world_size;
  std::vector<Replica> replicas;
  for (std::int64_t r = 0; r < d; ++r) {
    nudge(options, replicas.emplace_back(options).parameters());
  }
  const Replica& first = replicas.front();
  const Dataset data = Dataset::open(options, first.loaded.config);
  ReferenceRun run;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    double loss = 0;
    for (std::int64_t r = 0; r < d; ++r) {
      const MicroBatch own{{r, d}, options.batch / d};
      loss += accumulate_gradients(options, replicas[r].model(), data, step,
                                   {own}, /*loss_scale=*/d);
      update_parameters(options, *replicas[r].optimizer);
    }
    run.losses.push_back(loss);
    if ((step + 1) % every != 0) continue;
    for (std::size_t i = 0; i < first.parameters().size(); ++i) {
      const Tensor& mean = first.parameters()[i];
      for (int r = 1; r < d; ++r) add_into(mean, replicas[r].parameters()[i]);
      scale_into(mean, mean, 1.0 / d);
      for (int r = 1; r < d; ++r) replicas[r].parameters()[i].copy_from(mean);
    }
  }
  run.parameters = first.model().named_parameters();
  return run;
}

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then your own.
  auto& options = line.own<Options>();
  options.optimizer = "sgd";
  auto& every = line.own<std::int64_t>(3);
  line.describe("local_sgd", "Local SGD: steps alone, then an average.");
  add_shared_options(line, options);
  line.add("--average-every", &every, "steps between two averages", 1);
  line.parse();
  check_options(options);
  check_even_batch(options, options.world_size, 1, "--world-size");

  // 2. Train: every rank does this, in every world.
  ChapterRun chapter;
  chapter.rank = [&every](const Options& options, ProcessGroup& world,
                          Run& run) {
    DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
    LocalSgd strategy(options, every, mesh.group("dp"));
    run.train(options, strategy);
  };
  // 3. Compare with one device.
  chapter.reference = [&every](const Options& options) {
    return train_in_turns(options, every);
  };
  chapter.add_to_report = [&every](Report& report) {
    if (every > 1) {  // tables mark it
      report.more.emplace_back("other_training", "\"steps of its own\"");
    }
  };
  return {options, chapter};
}

}  // namespace

int main(int argc, char** argv) { return program_main(program, argc, argv); }
