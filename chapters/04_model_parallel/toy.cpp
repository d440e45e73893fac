#include "chapters/04_model_parallel/toy.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/common/run/worlds.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::model_parallel {
namespace {

class ToyLayer : public ModuleOf<ToyLayer> {
 public:
  ToyLayer(std::string name, std::int64_t out, bool with_relu,
           const InitOptions& init)
      : name_(std::move(name)),
        with_relu_(with_relu),
        linear_(name_, 10, out, init) {}
  Tensor forward(const Tensor& x) override {
    const Tensor y = linear_(x);
    return with_relu_ ? relu(y) : y;
  }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }
  std::string type_name() const override { return "ToyLayer"; }

 private:
  std::string name_;
  bool with_relu_;
  Linear linear_;
};

class ToyLayers : public LayerList {
 public:
  int size() const override { return 2; }
  std::string name(int layer) const override {
    return layer == 0 ? "net1" : "net2";
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    return std::make_unique<ToyLayer>(name(layer), layer == 0 ? 10 : 5,
                                      /*with_relu=*/layer == 0, init);
  }
};

constexpr std::int64_t kRows = 20;

Tensor random_rows(const Options& options, std::int64_t width,
                   std::uint64_t stream) {
  const Tensor rows = Tensor::empty({kRows, width}, {options.dtype, Device()});
  fill_normal(rows, options.seed, stream, 0, 1);
  return rows;
}

/// Trains the model `forward`, which has these parameters.
ToyRun train_one(const std::string& name, const Options& options,
                 const std::function<Tensor(const Tensor&)>& forward,
                 const std::vector<NamedTensor>& parameters) {
  const Tensor x = random_rows(options, 10, 1), y = random_rows(options, 5, 2);
  Tensors weights;
  for (const NamedTensor& each : parameters) weights.push_back(each.tensor);
  const auto optimizer =
      make_optimizer(options.optimizer, weights, options.optimizer_options);
  ToyRun run;
  run.name = name;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const Tensor output = forward(x);
    // The labels must be where the output is
    const Tensor loss = mse_loss(output, to_device(y, output.device()));
    loss.backward();
    optimizer->step();
    for (const Tensor& weight : weights) weight.clear_grad();
    run.losses.push_back(loss.item());
  }
  const NoGrad no_grad;
  run.values = parameters;
  run.values.push_back({"output", forward(x)});
  return run;
}

}  // namespace

std::unique_ptr<LayerList> toy_layers() {
  return std::make_unique<ToyLayers>();
}

std::vector<ToyRun> train_toy(const Options& options, std::int64_t split_size) {
  const std::vector<Device> devices = {make_device(options, 0),
                                       make_device(options, 1)};
  RankContext context(devices[0], /*rank=*/0, /*num_threads=*/1);
  context.deterministic = true;
  const RankContext::Scope scope(context);
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  const auto layers = toy_layers();
  Stage one(*layers, 0, 2, init);
  ModelParallel naive(*layers, 1, devices, init);
  PipelineParallel pipelined(*layers, 1, devices, init, split_size);
  std::vector<ToyRun> runs = {
      train_one(
          "one device", options, [&](const Tensor& x) { return one(x); },
          one.named_parameters()),
      train_one(
          "naive", options, [&](const Tensor& x) { return naive(x); },
          naive.named_parameters()),
      train_one(
          "splits of " + std::to_string(split_size), options,
          [&](const Tensor& x) { return pipelined(x); },
          pipelined.named_parameters())};
  for (ToyRun& run : runs) {
    for (std::size_t i = 0; i < run.values.size(); ++i) {
      run.largest_difference = std::max(
          run.largest_difference,
          max_abs_difference(run.values[i].tensor, runs[0].values[i].tensor));
    }
  }
  return runs;
}

std::string toy_text(const std::vector<ToyRun>& runs) {
  std::string text =
      "toy: net1 is Linear(10, 10) and ReLU, net2 is Linear(10, 5)\n";
  for (const NamedTensor& each : runs.back().values) {
    text += fmt::format("  {:<14}{:<12}{}\n", each.name,
                        shape_text(each.tensor.shape()),
                        each.tensor.device().name());
  }
  for (const ToyRun& run : runs) {
    text += fmt::format("  {:<14}loss {:.4f} -> {:.4f}", run.name,
                        run.losses.front(), run.losses.back());
    text += &run == &runs[0]
                ? "\n"
                : fmt::format("  largest difference from one device {:.3g}\n",
                              run.largest_difference);
  }
  return text;
}

int show_toy(const Options& options, std::int64_t split_size) {
  SB_CHECK(options.backend == "threads" && options.steps >= 1,
           "--toy prints numbers; give --backend threads and --steps of at "
           "least 1");
  fmt::print("{}", toy_text(train_toy(options, split_size)));
  return 0;
}

}  // namespace shardbook::model_parallel
