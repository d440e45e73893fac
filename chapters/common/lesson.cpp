#include "chapters/common/lesson.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "core/autograd.h"
#include "core/context.h"

namespace shardbook::lesson {
namespace {

constexpr double kTolerance = 1e-12;

/// The largest |a - b| of all weights, relative to the largest weight.
double relative_difference(const std::vector<NamedTensor>& weights,
                           const std::vector<NamedTensor>& expected) {
  std::map<std::string, Tensor> by_name;
  for (const NamedTensor& each : weights) by_name[each.name] = each.tensor;
  double largest = 0, difference = 0;
  for (const auto& [name, tensor] : expected) {
    SB_CHECK(by_name.count(name) != 0, "the lesson returns no weight \"", name,
             "\": give all weights of the model, by name, on rank 0");
    const Tensor& ours = by_name[name];
    SB_CHECK(ours.shape() == tensor.shape(), "weight \"", name, "\" is ",
             shape_text(ours.shape()), ", one device has ",
             shape_text(tensor.shape()));
    for (const double value : tensor.to_vector<double>()) {
      largest = std::max(largest, std::abs(value));
    }
    difference = std::max(difference, max_abs_difference(ours, tensor));
    if (std::isnan(difference)) return difference;
  }
  return difference / largest;
}

}  // namespace

const char* const kGpt =
    R"({"n_layer": 4, "n_embd": 24, "n_head": 12, "n_positions": 12,
        "vocab_size": 48})";
const char* const kMlp =
    R"({"model_type": "mlp", "n_embd": 48, "vocab_size": 48})";

// --- The run -------------------------------------------------------------------

Options options(const std::string& model) {
  Options options;
  options.model = model;
  options.data = "walk";
  options.dtype = DType::kF64;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.1;
  options.steps = kSteps;
  options.batch = kBatch;
  options.seq = kSequence;
  return options;
}

ModelConfig config(const std::string& model) {
  return ModelConfig::read(model);
}

std::unique_ptr<Optimizer> sgd(const Tensors& parameters) {
  return make_optimizer("sgd", parameters, options().optimizer_options);
}

InitOptions init() {
  InitOptions init;
  init.dtype = DType::kF64;
  return init;
}

InitOptions no_values() {
  InitOptions init = lesson::init();
  init.device = Device::meta();
  return init;
}

Batch batch(int step, int rank, int ranks) {
  static const Dataset data = Dataset::open("walk", kSequence, 48, /*seed=*/0);
  return data.batch(step, kBatch, {rank, ranks}, kBatch / ranks);
}

double num_parameters(const std::string& model) {
  const auto whole = make_model(config(model), no_values());
  return static_cast<double>(whole->num_parameters());
}

// --- Small pieces ----------------------------------------------------------------

double sum_over(const Tensor& loss, ProcessGroup& group) {
  const Tensor sum = loss.detach().clone();
  group.all_reduce(sum, ReduceOp::kSum, "loss").wait();
  return sum.item();
}

double mean_over(const Tensor& loss, ProcessGroup& group) {
  return sum_over(loss, group) / group.size();
}

Tensor visible(std::int64_t n, std::int64_t first_query,
               std::int64_t first_key) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n * n; ++i) {
    values.push_back(first_query + i / n >= first_key + i % n ? 1 : 0);
  }
  return Tensor::from_values(values, {n, n});
}

Tensor one_hot_of_largest(const Tensor& x) {
  const std::vector<double> in = x.to_vector<double>();
  std::vector<double> out(in.size(), 0);
  const auto n = static_cast<std::ptrdiff_t>(x.size(1));
  for (auto row = in.begin(); row != in.end(); row += n) {
    const auto largest = std::max_element(row, row + n);
    out[static_cast<std::size_t>(largest - in.begin())] = 1;
  }
  return Tensor::from_values(out, x.shape());
}

Tensor gather_columns(const Tensor& block, ProcessGroup& group) {
  const std::int64_t n = block.size(1), first = group.rank() * n;
  return autograd::custom_function(
      "gather", {block},
      [&group, n](const Tensors& in) {
        const std::int64_t c = group.size(), rows = in[0].size(0);
        const Tensor all = Tensor::empty({c, rows, n}, in[0].options());
        group.all_gather(all, in[0]).wait();
        return Tensors{reshape(transpose(all, 0, 1), {rows, c * n})};
      },
      [=](const Tensors& grad) {
        return Tensors{slice(grad[0], 1, first, first + n)};
      })[0];
}

int root_of(int ranks, double dims) {
  return static_cast<int>(std::lround(std::pow(ranks, 1 / dims)));
}

Tensor columns_of(const Tensor& x, int i, int n) {
  const std::int64_t width = x.size(-1) / n;
  return slice(x, x.ndim() - 1, i * width, (i + 1) * width);
}

bool is_matrix(const std::string& name) {
  return name != "wte.weight" && name.find("weight") != std::string::npos;
}

Parts take_parts(ProcessGroup& world, const PartOf& part_of) {
  MlpModel whole(config(kMlp), init());
  Parts parts;
  for (const auto& [name, tensor] : whole.named_parameters()) {
    parts[name] = take_part(tensor.detach(), part_of(name, world.rank()));
    parts[name].set_requires_grad();
  }
  return parts;
}

Tensors values_of(const Parts& parts) {
  Tensors values;
  for (const auto& [name, part] : parts) values.push_back(part);
  return values;
}

std::vector<NamedTensor> named(const Parts& parts) {
  std::vector<NamedTensor> result;
  for (const auto& [name, part] : parts) result.push_back({name, part});
  return result;
}

void sum_whole(const Parts& parts, ProcessGroup& world, const PartOf& part_of) {
  for (const auto& [name, part] : parts) {
    if (!part_of(name, world.rank()).empty()) continue;
    world.all_reduce(part.grad()).wait();
  }
}

// --- What a rank returns -----------------------------------------------------------

Result count(ProcessGroup& world, double loss) {
  const MemoryStats memory = RankContext::current().device.memory();
  return {loss, world.sent_bytes(), static_cast<double>(memory.peak_total)};
}

std::vector<NamedTensor> collect(ProcessGroup& world,
                                 const std::vector<NamedTensor>& own) {
  // Rank 0 must know names and shapes: "name 2 3 4" per line
  std::string text;
  for (const NamedTensor& each : own) {
    text += each.name;
    for (const std::int64_t size : each.tensor.shape()) {
      text += " " + std::to_string(size);
    }
    text += "\n";
  }
  const std::vector<std::string> texts = world.exchange(text);
  if (world.rank() != 0) {
    for (const NamedTensor& each : own) world.send(each.tensor, 0).wait();
    return {};
  }
  Parts all;
  for (const NamedTensor& each : own) all[each.name] = each.tensor;
  for (int r = 1; r < world.size(); ++r) {
    std::istringstream lines(texts[static_cast<std::size_t>(r)]);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string name;
      words >> name;
      Shape shape;
      for (std::int64_t size = 0; words >> size;) shape.push_back(size);
      const Tensor tensor = Tensor::empty(shape, {DType::kF64, {}});
      world.recv(tensor, r).wait();
      all.emplace(name, tensor);
    }
  }
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor] : all) result.push_back({name, tensor});
  return result;
}

std::vector<NamedTensor> join(const std::vector<NamedTensor>& parts,
                              ProcessGroup& world, const PartOf& part_of) {
  std::vector<NamedTensor> whole;
  for (const auto& [name, tensor] : parts) {
    const Tensor part = tensor.detach();
    const Shape shape = whole_shape(part_of(name, 0), part.shape());
    whole.push_back({name, Tensor::empty(shape, part.options())});
    const Tensor all =
        Tensor::empty({world.size() * part.numel()}, part.options());
    world.all_gather(all, part).wait();
    for (int r = 0; r < world.size(); ++r) {
      put_part(whole.back().tensor,
               all.flat_view(r * part.numel(), part.shape()), part_of(name, r));
    }
  }
  return whole;
}

Result finish(ProcessGroup& world, double loss,
              const std::vector<NamedTensor>& parts, const PartOf& part_of) {
  Result result = count(world, loss);
  result.weights = join(parts, world, part_of);
  return result;
}

// --- The comparison ------------------------------------------------------------------

OneDevice one_device(const std::string& model) {
  return [model] { return train_one_device(options(model)); };
}

Comparison run(int ranks, const Train& train, const OneDevice& alone) {
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& world) {
    results[static_cast<std::size_t>(world.rank())] = train(world);
  });
  const ReferenceRun expected = alone();
  Comparison result;
  result.loss = results[0].loss;
  result.one_device_loss = expected.losses.back();
  result.difference =
      relative_difference(results[0].weights, expected.parameters);
  for (const Result& each : results) {
    result.bytes.push_back(each.bytes);
    result.peak_bytes.push_back(each.peak_bytes);
  }
  return result;
}

int compare(int ranks, const Train& train, const Bill& bill,
            const OneDevice& alone) {
  const Comparison run = lesson::run(ranks, train, alone);
  const bool is_equal = run.difference <= kTolerance;
  std::printf("numbers  loss %.10f on %d ranks, %.10f on one device\n",
              run.loss, ranks, run.one_device_loss);
  std::printf("         %s: weights differ by %.1e\n",
              is_equal ? "equal" : "DIFFERENT", run.difference);
  bool is_as_billed = true;
  std::printf("bytes   ");
  for (int r = 0; r < ranks; ++r) {
    const double sent = run.bytes[static_cast<std::size_t>(r)];
    std::printf(" %.0f", sent);
    if (std::abs(sent - bill(r, ranks)) > 0.5) {
      is_as_billed = false;
      std::printf(" (by the bill %.0f)", bill(r, ranks));
    }
  }
  std::printf(" sent by the ranks: %s\n",
              is_as_billed ? "as billed" : "NOT AS BILLED");
  std::printf("memory  ");
  for (const double peak : run.peak_bytes) std::printf(" %.0f", peak);
  std::printf(" bytes at the peak\n");
  return is_equal && is_as_billed ? 0 : 1;
}

}  // namespace shardbook::lesson
