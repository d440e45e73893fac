#include "chapters/common/lesson.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/context.h"

namespace shardbook::lesson {
namespace {

struct Current {
  explicit Current(const Task& task)
      : task(task),
        data(Dataset::open("walk", task.sequence, task.vocabulary, task.seed)) {
  }
  Task task;
  Dataset data;
};
// Changes only while no rank runs
Current& current() {
  static Current current{Task()};
  return current;
}

}  // namespace

const Task& task() { return current().task; }

void set_task(const Task& task) { current() = Current(task); }

int batch_size() { return task().batch; }
int sequence() { return task().sequence; }
int num_tokens() { return task().batch * task().sequence; }

std::string gpt() {
  return fmt::format(
      R"({{"n_layer": 4, "n_embd": {}, "n_head": {}, "n_positions": {},
           "vocab_size": {}}})",
      task().width, task().heads, task().sequence, task().vocabulary);
}

std::string mlp() {
  return fmt::format(
      R"({{"model_type": "mlp", "n_embd": {0}, "vocab_size": {0}}})",
      task().vocabulary);
}

std::vector<std::pair<double, double>> mlp_layers() {
  const double h = task().vocabulary;
  return {{h, 4 * h}, {4 * h, h}, {h, h}};
}

Options options(const std::string& model) {
  Options options;
  options.model = model;
  options.data = "walk";
  options.dtype = DType::kF64;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.1;
  options.steps = kSteps;
  options.batch = task().batch;
  options.seq = task().sequence;
  options.seed = task().seed;
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
  init.seed = task().seed;
  return init;
}

InitOptions no_values() {
  InitOptions init = lesson::init();
  init.device = Device::meta();
  return init;
}

Batch batch(int step, int rank, int ranks) {
  return current().data.batch(step, task().batch, {rank, ranks},
                              task().batch / ranks);
}

double num_parameters(const std::string& model) {
  const auto whole = make_model(config(model), no_values());
  return static_cast<double>(whole->num_parameters());
}

// --- Small pieces ------------------------------------------------------------

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

// --- The mlp's parameters in parts -------------------------------------------

bool is_matrix(const std::string& name) {
  return name != "wte.weight" && name.find("weight") != std::string::npos;
}

Parts take_parts(ProcessGroup& world, const ParameterLayout& layout) {
  MlpModel whole(config(mlp()), init());
  Parts parts;
  for (const auto& [name, tensor] : whole.named_parameters()) {
    parts[name] = take_part(tensor.detach(), layout(name, world.rank()));
    parts[name].set_requires_grad();
  }
  return parts;
}

Tensors values_of(const Parts& parts) {
  Tensors values;
  for (const auto& [name, part] : parts) values.push_back(part);
  return values;
}

void clear_gradients(const Parts& parts) {
  for (const auto& [name, part] : parts) part.clear_grad();
}

void sum_whole(const Parts& parts, ProcessGroup& world,
               const ParameterLayout& layout) {
  for (const auto& [name, part] : parts) {
    if (!layout(name, world.rank()).empty()) continue;
    world.all_reduce(part.grad()).wait();
  }
}

// --- What a rank returns -----------------------------------------------------

Result count(ProcessGroup& world, double loss) {
  const MemoryStats memory = RankContext::current().device.memory();
  return {loss, world.sent_bytes(),
          static_cast<double>(memory.peak_of_tensors)};
}

std::vector<NamedTensor> collect(ProcessGroup& world,
                                 const std::vector<NamedTensor>& own) {
  Parts parts;
  for (const NamedTensor& each : own) parts[each.name] = each.tensor;
  const auto whole = make_model(config(), no_values());
  std::vector<NamedTensor> result;
  for (const auto& [name, empty] : whole->named_parameters()) {
    // A rank without the tensor gives less than every other
    constexpr double kLess = -std::numeric_limits<double>::infinity();
    const Tensor largest =
        Tensor::full(empty.shape(), kLess, {DType::kF64, Device()});
    if (parts.count(name) != 0) largest.copy_from(parts[name].detach());
    world.all_reduce(largest, ReduceOp::kMax).wait();
    result.push_back({name, largest});
  }
  return result;
}

std::vector<NamedTensor> join(const std::vector<NamedTensor>& parts,
                              const ParameterLayout& layout,
                              ProcessGroup& group) {
  return gather_parts(parts, layout, group, task().vocabulary);
}

Result finish(ProcessGroup& world, double loss, const Parts& parts,
              const ParameterLayout& layout) {
  Result result = count(world, loss);
  std::vector<NamedTensor> named;
  for (const auto& [name, part] : parts) named.push_back({name, part});
  result.weights = join(named, layout, world);
  return result;
}

ReferenceRun mlp_on_one_device() { return train_one_device(options(mlp())); }

void write_this(const std::string& function) {
  SB_FAIL(function,
          " is empty: write it; comments above and in it say what it does");
}

}  // namespace shardbook::lesson
