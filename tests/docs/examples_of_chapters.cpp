// The examples in the comments of the chapters' headers, as code that compiles.
// docs_test.cpp looks for each line of an example below its header's name.

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/02_ddp/comm_hooks.h"
#include "chapters/02_ddp/ddp.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/03_zero_fsdp/fsdp/wrap.h"
#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/weight_stash.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/14_hybrid_3d/update.h"
#include "chapters/common/lesson.h"
#include "chapters/common/models/block.h"
#include "chapters/common/models/counted_model.h"
#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/models/resnet.h"
#include "chapters/common/pipeline/mailbox.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/command_line.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/program.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/worlds.h"
#include "chapters/common/toy.h"
#include "chapters/pictures/figure.h"
#include "chapters/pictures/lanes.h"
#include "chapters/pictures/plot.h"
#include "chapters/pictures/timeline_picture.h"
#include "chapters/planner/answer.h"
#include "chapters/programs/programs.h"
#include "chapters/programs/sweep.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"
#include "comm/shape_group.h"
#include "core/optim.h"

namespace shardbook::examples {

using namespace pipeline;

// --- chapters/01_data_parallel/data_parallel.h
void data_parallel(Module& module, Device gpu0, Device gpu1, Device gpu2,
                   const Tensor& x, const Tensor& targets,
                   Optimizer& optimizer) {
  using data_parallel::DataParallel;
  DataParallel model(module, {gpu0, gpu1, gpu2});
  Tensor y = model(x);
  language_loss(y, targets).backward();
  optimizer.step();
}

// --- chapters/02_ddp/comm_hooks.h
void comm_hooks(ddp::DistributedDataParallel& ddp) {
  ddp.register_comm_hook(ddp::bf16_compress_hook());
}

// --- chapters/02_ddp/ddp.h
void ddp(const ModelConfig& config, const Batch& batch) {
  run_ranks(4, [&](ProcessGroup& world) {
    MlpModel model(config, {});
    ddp::DistributedDataParallel ddp(model, world);
    auto optimizer = make_optimizer("adamw", model.parameters(), {});
    Tensor loss = language_loss(ddp(batch.inputs), batch.targets);
    loss.backward();
    optimizer->step();
  });
}

// --- chapters/03_zero_fsdp/fsdp/fsdp.h
void fsdp(Module& model, ProcessGroup& world,
          const std::vector<Batch>& batches) {
  using namespace fsdp;
  FsdpOptions options;
  options.auto_wrap_policy = transformer_auto_wrap_policy({"GptBlock"});
  FullyShardedDataParallel fsdp(model, world, options);
  auto optimizer = make_optimizer("adamw", fsdp.parameters(), {});
  for (const Batch& batch : batches) {
    language_loss(fsdp(batch.inputs), batch.targets).backward();
    fsdp.clip_grad_norm_(1.0);
    optimizer->step();
    fsdp.clear_grad();
  }
}

void fully_shard(Gpt& gpt, ProcessGroup& world) {
  using fsdp::fully_shard;
  auto model = fully_shard(gpt, {&gpt.h[0], &gpt.h[1]}, world);
}

// --- chapters/03_zero_fsdp/fsdp/wrap.h
void wrap(Gpt& model, const fsdp::UnitOptions& own_options) {
  using namespace fsdp;
  using fsdp::wrap;
  auto policy = size_based_auto_wrap_policy(1'000'000);
  std::vector<Module*> units = auto_wrap(model, policy);

  WrapPlan plan;
  {
    EnableWrap scope(plan, {/* options of every wrap inside */});
    wrap(plan, model.h[0]);
    wrap(plan, model.h[1], own_options);
  }
  wrap(plan, *model.ln_f);
}

// --- chapters/03_zero_fsdp/zero/zero.h
void zero(Module& model, ProcessGroup& world, const zero::ZeroOptions& options,
          const OptimizerOptions& adam_options,
          const std::vector<Batch>& batches) {
  auto zero = zero::make_zero(model, world, options, "adamw", adam_options);
  for (const Batch& batch : batches) {
    language_loss((*zero)(batch.inputs), batch.targets).backward();
    zero->step();
  }
}

// --- chapters/04_model_parallel/model_parallel.h
void model_parallel(const ModelConfig& config, Device gpu0, Device gpu1,
                    const InitOptions& init, const Tensor& images) {
  using namespace model_parallel;
  const auto layers = resnet_layers(ModelConfig::read("resnet50"));
  ModelParallel naive(*layers, half_of(config), {gpu0, gpu1}, init);
  Tensor y = naive(images);
  PipelineParallel pipelined(*layers, half_of(config), {gpu0, gpu1}, init,
                             /*split_size=*/20);
}

// --- chapters/05_gpipe/gpipe.h
void gpipe(const Options& options, std::shared_ptr<const LayerList> layers,
           const std::vector<int>& cuts, ProcessGroup& world, Feed& feed) {
  const Schedule schedule = gpipe::schedule(world.size(), 8);
  PipelineModel model(options, layers, layout_of(schedule, cuts), world);
  Engine engine(schedule, model, world, feed, nullptr,
                {Recompute::kExceptLast});
  engine.run();
}

// --- chapters/14_hybrid_3d/update.h
void update_of_a_mesh(Engine& engine, hybrid::Update& update, double factor) {
  engine.run();
  update.reduce();
  update.sum_of_squares();
  update.apply(factor);
}

// --- comm/shape_group.h
void shape_group(const ModelConfig& config) {
  ShapeGroup tp(/*rank=*/1, /*size=*/4, "tp");
  LayerFactory layers = tensor_parallel::layers(config, tp);
}

// --- chapters/common/lesson.h
namespace example_of_lesson {
lesson::Result train(ProcessGroup& dp);
double bill(int rank, int ranks);
int main() { return lesson::compare({/*ranks=*/{4, 2}, train, bill}); }
}  // namespace example_of_lesson

// --- chapters/common/toy.h
void toy_numbers() {
  toy::Torch torch(0);
  Linear net = torch.linear("net", 10, 10);
  const Tensor x = torch.randn({20, 10});
}

// --- chapters/common/sharded/parts.h
void parts(Module& model, const ModelConfig& config, ProcessGroup& tp, int t) {
  ParameterLayout layout = [=](const std::string& name, int rank) {
    return tensor_parallel::layout(config, name, rank, t);
  };
  std::vector<NamedTensor> whole =
      gather_parts(model.named_parameters(), layout, tp, config.vocab_size);
}

// --- chapters/06_1f1b/weight_stash.h
void weight_stash(Module& model, Optimizer& optimizer) {
  WeightStash stash(model.parameters());
  stash.load(3);
  stash.load(stash.newest());
  stash.advance(/*oldest_needed=*/4);
  optimizer.step();
}

// --- chapters/08_tensor_parallel_2d/summa_layers.h
void blocks(DeviceMesh& mesh, const Tensor& x, const Tensor& weight,
            const Tensor& bias, const ModelConfig& config,
            const InitOptions& init) {
  using namespace summa;
  Grid grid = grid_of(mesh);
  Tensor y = linear(x, weight, bias, grid);
  Gpt model(config, init, layers(grid));
}

// --- chapters/10_tensor_parallel_3d/cube_layers.h
void on_a_cube(DeviceMesh& mesh, const Tensor& x, const Tensor& weight,
               const Tensor& bias, const ModelConfig& config,
               const InitOptions& init) {
  using namespace cube;
  Cube cube = cube_on(mesh);
  Tensor y = linear(x, weight, bias, cube);
  Gpt model(config, init, layers(cube));
}

// --- chapters/common/models/block.h
double block(const ModelConfig& config) {
  double parameters = 0;
  for (const BlockPart& part : block_table(config).parts()) {
    parameters += part.parameters();
  }
  return parameters;
}

// --- chapters/common/models/counted_model.h
double counted() {
  const CountedModel model = CountedModel::read("config.json");
  model.parameters();  // tied tables once
  model.parts()["attention"];
  return model.operations(2048, Mask::kCounted);  // of a token's forward
}

// --- chapters/common/models/data.h
void data(std::uint64_t seed, std::int64_t step, std::int64_t rank,
          std::int64_t ranks) {
  Dataset data = Dataset::open("book", /*seq=*/64, /*vocab=*/256, seed);
  Batch all = data.batch(step, /*global_batch=*/24);
  Batch mine = data.batch(step, 24, {rank, ranks}, /*rows=*/24 / ranks);
}

// --- chapters/pictures/figure.h
void figure() {
  using pictures::Figure;
  Figure figure("A step computes for half of its time");
  figure.legend({{"forward", "forward"}, {"backward", "backward"}});
  const double y = figure.add_row(20);
  figure.text(0, y + 14, "rank 0");
  figure.box({110, y, 200, 20}, "forward");
  figure.axis(110, 710, /*length=*/0.25, {"ms", 1e-3}, "virtual time");
  figure.svg("rank 0 computes for 125 of 250 ms");
}

// --- chapters/pictures/plot.h
void plot(pictures::Figure& figure,
          const std::vector<pictures::Value>& points) {
  using namespace pictures;
  Plot plot(figure, PlotSize{110, 400, 220}, logarithmic("tokens", 250, 4000),
            {"share of the step", 0, 1, {"%", 0.01}});
  plot.curve(points, kBlue, "8 ranks");
  plot.mark(1750, kBlue, "inequality: 1750");
  plot.svg("from 80 % to 10 %");
}

// --- chapters/pictures/lanes.h
void lanes(pictures::Figure& figure, const sim::RankTimeline& timeline,
           const Report& report) {
  using pictures::Lanes;
  Lanes lanes(figure, 90, figure.width(), /*length_s=*/0.25);
  lanes.queue("network", timeline, "comm world", report.time.step_s, 16);
  lanes.axis({"ms", 1e-3});
}

// --- chapters/programs/sweep.h
void sweep_of_runs(pictures::Plot& plot) {
  using pictures::kBlue;
  plot.curve(
      sweep("05_gpipe --world-size 4", "--micro-batches", {1, 2, 4}, step_s),
      kBlue);
}

// --- chapters/pictures/timeline_picture.h
void timelines(const Report& a, const Report& b) {
  using pictures::timelines;
  timelines("GPipe and 1F1B take as long",
            {{"GPipe", a.timelines}, {"1F1B", b.timelines}});
}

// --- chapters/common/pipeline/schedule_check.h
void check(const Schedule& s) {
  using pipeline::check;
  check(s);
}

// --- chapters/common/pipeline/pipeline_engine.h
void engine(const Options& options, std::shared_ptr<const LayerList> layers,
            const std::vector<int>& cuts, ProcessGroup& world, Feed& feed) {
  Schedule schedule = schedules::one_f_one_b(4, 8);
  PipelineModel model(options, layers, layout_of(schedule, cuts), world);
  Engine engine(schedule, model, world, feed);
  const double loss = engine.run();
}

// --- chapters/common/pipeline/mailbox.h
void mailbox(ProcessGroup& world, int num_stages, const StageRun& run, int b,
             int s, int rank, const LayerInput& spec) {
  Mailbox mailbox(world, num_stages);
  mailbox.send_forward(run.outputs, b, s + 1, /*to=*/rank + 1);
  Tensors grads = mailbox.receive_backward(spec, b, s + 1, rank + 1);
  mailbox.flush();
}

// --- chapters/common/pipeline/pipeline_model.h
void pipeline_model(const Options& options,
                    std::shared_ptr<const LayerList> layers,
                    const std::vector<int>& cuts,
                    const std::vector<std::vector<int>>& owners,
                    ProcessGroup& world, Optimizer& optimizer,
                    double local_loss) {
  PipelineModel model(options, layers, {cuts, owners}, world);
  model.reduce_shared_gradients();
  StepResult result = model.update(options, optimizer, local_loss);
}

// --- chapters/common/pipeline/replay.h
void replay(const Schedule& s) {
  using pipeline::replay;
  Replay r = replay(s, {.forward = 1, .backward = 2});
  std::cout << draw(s, r);
  idle_share(r);
  max_live_activations(s, Until::kInput);
}

// --- chapters/common/pipeline/schedule.h
void schedule() {
  using pipeline::check, pipeline::draw, pipeline::replay;
  Schedule s = schedules::one_f_one_b(/*num_ranks=*/4, /*micro_batches=*/8);
  check(s);
  Replay r = replay(s, {.forward = 1, .backward = 2});
  std::cout << draw(s, r);
}

// --- chapters/common/pipeline/stages.h
void stages(const ModelConfig& config, const InitOptions& init, std::size_t s) {
  const auto layers = layers_of(config);
  const std::vector<int> cuts = cut_uniform(layers->size(), 4);
  Stage stage(*layers, cuts[s], cuts[s + 1], init);
}
void stage_run(Module& stage, const Tensors& inputs, const LayerInput& spec,
               const Tensors& grad_outputs) {
  StageRun run = run_forward(stage, inputs, spec);
  Tensors grads = run_backward(std::move(run), grad_outputs);
}

// --- chapters/common/run/command_line.h
void compared(CommandLine& line, int k, double mb, const std::string& why) {
  line.add("--top-k", &k, "experts that a token visits", 1);
  line.add("--bucket-mb", &mb, "size of a bucket").may_differ(why);
}

// --- chapters/common/run/options.h
namespace options {
double bucket_mb = 25;
int report(const Options& options);
int main(int argc, char** argv) {
  return chapter_main([&] {
    Options options;
    CommandLine line("ch02_ddp", "DistributedDataParallel");
    add_shared_options(line, options);
    line.add("--bucket-mb", &bucket_mb, "size limit of a bucket", 0.001);
    line.parse(argc, argv);
    return report(options);
  });
}
}  // namespace options

// --- chapters/common/run/program.h
namespace program_example {
Program program(CommandLine& line) {
  auto& options = line.own<Options>();
  auto& setup = line.own<ddp::StrategyOptions>();
  line.describe("ch02_ddp", "DistributedDataParallel.");
  add_shared_options(line, options);
  ddp::add_options(line, setup);
  line.parse();
  check_options(options);
  ChapterRun chapter;
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
    ddp::DdpStrategy strategy(options, setup, mesh.group("dp"));
    run.train(options, strategy);
  };
  chapter.reference = [](const Options& options) {
    return train_one_device(options);
  };
  return {options, chapter};
}
int main(int argc, char** argv) { return program_main(program, argc, argv); }
}  // namespace program_example

// --- chapters/programs/programs.h
double step_time() {
  const Report report = run("05_gpipe --world-size 4 --recompute never");
  return report.time.step_s;
}

// --- chapters/common/run/strategy.h
void strategy(const Options& options, const ddp::StrategyOptions& setup,
              DeviceMesh& mesh, Run& run) {
  using ddp::DdpStrategy;
  DdpStrategy strategy(options, setup, mesh.group("dp"));
  run.train(options, strategy);
}

// --- chapters/common/run/worlds.h
void worlds(const Options& options, const ddp::StrategyOptions& setup,
            const Bill& bill) {
  using ddp::DdpStrategy;
  const ChapterBody body = [&](const Options& options, ProcessGroup& world,
                               Report& report) {
    DdpStrategy strategy(options, setup, world);
    const TrainingLog log =
        train(options, strategy.optimizer(), world.rank() == 0,
              [&](std::int64_t step) { return strategy.step(step); });
    finish_rank(options, world, log, bill, report);
  };
  Report report = run_chapter(options, body);
}

// --- chapters/planner/answer.h
void answer() {
  CommandLine line({"plan", "--nodes", "8", "--batch", "1024"});
  std::fputs(planner::answer(line, planner::confirm).text.c_str(), stdout);
}

}  // namespace shardbook::examples
