#include "chapters/common/toy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "chapters/common/run/options.h"
#include "comm/launch.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::toy {

constexpr double kTolerance = 1e-6, kPi = 3.14159265358979323846;

std::vector<float> Torch::uniform(std::int64_t n, double from, double to) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) {
    const double share = static_cast<double>(bits_() & 0xffffff) / 0x1000000;
    value = static_cast<float>(share * (to - from) + from);
  }
  return values;
}

Tensor Torch::rand(const Shape& shape) {
  return Tensor::from_values(uniform(shape_numel(shape), 0, 1), shape);
}

Tensor Torch::randn(const Shape& shape) {
  const std::int64_t n = shape_numel(shape);
  SB_CHECK(n >= 16, "randn ", shape_text(shape), ": give 16 elements or more");
  std::vector<float> values = uniform(n, 0, 1);
  // Box and Muller's transform of 8 pairs, eight places apart
  const auto transform = [](float* x) {
    for (int i = 0; i < 8; ++i) {
      const double radius = std::sqrt(-2 * std::log(1.0 - x[i]));
      const double angle = 2 * kPi * x[i + 8];
      x[i] = static_cast<float>(radius * std::cos(angle));
      x[i + 8] = static_cast<float>(radius * std::sin(angle));
    }
  };
  const auto whole = static_cast<std::size_t>(n / 16 * 16);
  for (std::size_t i = 0; i < whole; i += 16) transform(&values[i]);
  // The last 16 are drawn again where 16 does not divide the number
  if (n % 16 != 0) {
    const std::vector<float> last = uniform(16, 0, 1);
    std::copy(last.begin(), last.end(), values.end() - 16);
    transform(&values[values.size() - 16]);
  }
  return Tensor::from_values(values, shape);
}

Linear Torch::linear(const std::string& name, std::int64_t in,
                     std::int64_t out) {
  Linear layer(name, in, out, {});
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  const Tensor weight =
      Tensor::from_values(uniform(out * in, -bound, bound), {out, in});
  layer.weight.copy_from(transpose(weight, 0, 1));
  layer.bias.copy_from(Tensor::from_values(uniform(out, -bound, bound), {out}));
  return layer;
}

Tensor Net::forward(const Tensor& x) {
  Tensor y = x;
  for (auto& [name, layer] : layers_) y = layer(y);
  return y;
}

void Net::members(MemberVisitor& visit) {
  for (auto& [name, layer] : layers_) visit.module(name, *layer);
}

std::string Net::name(int i) const {
  return layers_[static_cast<std::size_t>(i)].first;
}

std::unique_ptr<Module> Net::make(int i, const InitOptions& init) const {
  auto one = std::make_unique<Net>();
  one->layers_ = {layers_[static_cast<std::size_t>(i)]};
  one->replace_tensors([&](const std::string&, const Tensor& value) {
    const Tensor copy =
        Tensor::empty(value.shape(), {value.dtype(), init.device});
    if (!copy.is_meta()) copy.copy_from(value);
    return copy.set_requires_grad();
  });
  return one;
}

int run(int ranks, const std::function<bool(ProcessGroup& world)>& body) {
  std::atomic<bool> holds = true;
  run_ranks(ranks, [&](ProcessGroup& world) {
    if (!body(world)) holds = false;
  });
  return holds ? 0 : 1;
}

void print_in_order(ProcessGroup& world, const std::string& text) {
  const std::vector<std::string> texts = world.exchange(text);
  if (world.rank() == 0) fmt::print("{}", fmt::join(texts, ""));
}

std::string groups_text(ProcessGroup& world, const ProcessGroup* own) {
  const bool is_first = own != nullptr && own->rank() == 0;
  return fmt::to_string(fmt::join(
      world.exchange(
          is_first ? fmt::format(" [{}]", fmt::join(own->ranks(), " ")) : ""),
      ""));
}

namespace {

/// Micro-batch b of m is the b-th m-th of the rows.
struct Rows : pipeline::Feed {
  Rows(const Tensor& all, int m) : all(all), n(all.size(0) / m), outputs(m) {}
  pipeline::Piece piece(int b) const override {
    return {0, {b * n, 1}, n, 1.0 / static_cast<double>(outputs.size())};
  }
  Tensors inputs(int b) override {
    const Tensor piece =
        Tensor::empty({n, all.size(1)});  // on this rank's device
    piece.copy_from(all.rows_view(b * n, (b + 1) * n));
    return {piece};
  }
  Tensor loss(int b, const Tensors& out) override {
    outputs[static_cast<std::size_t>(b)] = out[0].detach().clone();
    return mean(square(out[0]));
  }
  Tensors example(std::int64_t rows) const override {
    return {Tensor::empty({rows, all.size(1)}, {DType::kF32, Device::meta()})};
  }
  DType dtype() const override { return DType::kF32; }
  Tensor all;
  std::int64_t n;
  Tensors outputs;
};

}  // namespace

PipelineRun run_pipeline(const Net& net, const Tensor& rows,
                         const pipeline::Schedule& schedule,
                         const pipeline::EngineOptions& options) {
  PipelineRun run;
  std::vector<NamedTensor> by_rank[2];
  run.most_sets.resize(2);
  run_ranks(2, [&](ProcessGroup& world) {
    PipelineModel model(Options(), std::make_shared<Net>(net),
                        one_stage_per_rank({0, 1, 2}), world);
    Rows feed(rows, schedule.num_micro_batches);
    pipeline::Engine engine(schedule, model, world, feed, nullptr, options);
    engine.run();
    const auto rank = static_cast<std::size_t>(world.rank());
    by_rank[rank] = model.named_state();
    run.most_sets[rank] = engine.max_live();
    if (rank == 1) run.outputs = feed.outputs;
  });
  for (const auto& each : by_rank) {
    run.parameters.insert(run.parameters.end(), each.begin(), each.end());
  }
  return run;
}

bool run_mlp(ProcessGroup& world, const LayerFactory& layers, const Shards& own,
             Tensor (*mark)(const Tensor& part)) {
  // 1. The MLP on one device, and this rank's parts of it
  ModelConfig config;
  config.n_embd = 256;
  config.gelu = GeluForm::kErf;
  config.dropout = 0.1;
  InitOptions init;
  init.dtype = DType::kF64;
  GptMlp whole("mlp", config, init);
  GptMlp mlp("mlp", config, init, layers);
  std::string lines;
  const auto watch = [&lines](const std::string& name, Module& layer) {
    lines += fmt::format("Weight of the {} linear layer: {}\n", name,
                         shape_text(layer.parameters()[0].shape()));
    layer.add_forward_hook([&lines, name](Module&, Tensors& y) {
      lines += fmt::format("Output of the {} linear layer: {}\n", name,
                           shape_text(y[0].shape()));
    });
  };
  watch("first", *mlp.c_fc);
  watch("second", *mlp.c_proj);
  // 2. Cut the input
  const Tensor input = Tensor::empty({16, 256}, {DType::kF64, Device()});
  fill_normal(input, /*seed=*/0, /*stream=*/0, 0, 1);
  const Tensor part = take_part(input, own);
  lines += "Input: " + shape_text(part.shape()) + "\n";
  // 3. Forward, on one device as well. Dropout draws for each element by its
  // place in the whole output, so both draw the same
  const Tensor expected = take_part(whole(input), own);
  RankContext::current().random = {};
  const Tensor y = mlp(mark == nullptr ? part : mark(part));
  // 4. Print what rank 0 has, and whether all ranks have what one device has
  const Tensor worst =
      Tensor::full({1}, max_abs_difference(y, expected), y.options());
  world.all_reduce(worst, ReduceOp::kMax).wait();
  const bool is_equal = worst.item() < 1e-12;
  if (world.rank() == 0) {
    fmt::print("{}Blocks of all ranks and one device's: {}\n", lines,
               is_equal ? "equal" : "DIFFERENT");
  }
  return is_equal;
}

std::string values_text(const Tensor& x) {
  std::vector<double> values = x.to_vector<double>();
  values.resize(std::min(values.size(), std::size_t{5}));
  return fmt::format("{:.6f}", fmt::join(values, " "));
}

int compare(const Tensors& found, const Tensors& one_device) {
  SB_CHECK(found.size() == one_device.size(), "compare: ", found.size(),
           " tensors with ", one_device.size());
  double largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double apart = max_abs_difference(found[i], one_device[i]);
    // NaN is larger
    if (!(apart <= largest)) largest = apart;
  }
  const bool is_equal = largest <= kTolerance;
  fmt::print("largest difference from one device {:.1e}: {}\n", largest,
             is_equal ? "equal" : "DIFFERENT");
  return is_equal ? 0 : 1;
}

}  // namespace shardbook::toy
