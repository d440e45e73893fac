#include "chapters/common/lesson.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <sstream>

#include "comm/launch.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"

namespace shardbook::lesson {
namespace {

constexpr double kTolerance = 1e-12, kMorePeak = 1.05;

/// What a lesson trains on. The mlp is as wide as its vocabulary.
struct Task {
  int batch, sequence, vocabulary, width, heads;
  std::uint64_t seed;
};
/// The one that the lessons show, and those that only the judge knows.
constexpr Task kTasks[] = {
    {12, 12, 48, 24, 12, 0}, {24, 8, 32, 16, 4, 1}, {24, 6, 24, 18, 6, 2}};
// Set while no rank runs
const Task* task = kTasks;

/// The line by which ./shardbook exercise knows the verdict, or "". It is taken
/// before any of the reader's code runs.
std::string take_word() {
  const char* word = std::getenv("SHARDBOOK_JUDGE");
  const std::string line =
      word == nullptr || *word == 0 ? "" : word + std::string("\n");
  ::unsetenv("SHARDBOOK_JUDGE");
  return line;
}
const std::string word_of_judge = take_word();

/// The largest |a - b| of all weights, relative to the largest weight, and the
/// weight that has it.
std::pair<double, std::string> difference(
    const std::vector<NamedTensor>& weights,
    const std::vector<NamedTensor>& expected) {
  std::map<std::string, Tensor> by_name;
  for (const NamedTensor& each : weights) by_name[each.name] = each.tensor;
  double scale = 0;
  std::pair<double, std::string> largest = {0, ""};
  for (const auto& [name, tensor] : expected) {
    SB_CHECK(by_name.count(name) != 0, "the lesson returns no weight \"", name,
             "\": give all weights of the model, by name, on rank 0");
    const Tensor& ours = by_name[name];
    SB_CHECK(ours.shape() == tensor.shape(), "weight \"", name, "\" is ",
             shape_text(ours.shape()), ", one device has ",
             shape_text(tensor.shape()));
    for (const double value : tensor.to_vector<double>()) {
      scale = std::max(scale, std::abs(value));
    }
    const double apart = max_abs_difference(ours, tensor);
    if (std::isnan(apart)) return {apart, name};
    if (apart > largest.first) largest = {apart, name};
  }
  return {largest.first / scale, largest.second};
}

/// "12 each", or every rank's.
std::string by_rank(const std::vector<double>& values) {
  if (std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) ==
      values.end()) {
    return with_commas(values[0]) + (values.size() > 1 ? " each" : "");
  }
  std::string text;
  for (const double value : values) {
    text += (text.empty() ? "" : ", ") + with_commas(value);
  }
  return text;
}

void add_claim(Verdict& verdict, const std::string& name, bool holds,
               const std::string& text) {
  verdict.text +=
      fmt::format("{:8} {:5}  {}\n", name, holds ? "holds" : "FAILS", text);
  if (!holds) verdict.failed += (verdict.failed.empty() ? "" : " ") + name;
}

}  // namespace

int batch_size() { return task->batch; }
int sequence() { return task->sequence; }
int num_tokens() { return task->batch * task->sequence; }

std::string gpt() {
  return fmt::format(
      R"({{"n_layer": 4, "n_embd": {}, "n_head": {}, "n_positions": {},
           "vocab_size": {}}})",
      task->width, task->heads, task->sequence, task->vocabulary);
}

std::string mlp() {
  return fmt::format(
      R"({{"model_type": "mlp", "n_embd": {0}, "vocab_size": {0}}})",
      task->vocabulary);
}

std::vector<std::pair<double, double>> mlp_layers() {
  const double h = task->vocabulary;
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
  options.batch = task->batch;
  options.seq = task->sequence;
  options.seed = task->seed;
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
  init.seed = task->seed;
  return init;
}

InitOptions no_values() {
  InitOptions init = lesson::init();
  init.device = Device::meta();
  return init;
}

Batch batch(int step, int rank, int ranks) {
  static const std::vector<Dataset> data = [] {
    std::vector<Dataset> all;
    for (const Task& each : kTasks) {
      all.push_back(
          Dataset::open("walk", each.sequence, each.vocabulary, each.seed));
    }
    return all;
  }();
  return data[static_cast<std::size_t>(task - kTasks)].batch(
      step, task->batch, {rank, ranks}, task->batch / ranks);
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
                              const ParameterLayout& layout,
                              ProcessGroup& group) {
  return gather_parts(parts, layout, group, task->vocabulary);
}

Result finish(ProcessGroup& world, double loss, const Parts& parts,
              const ParameterLayout& layout) {
  Result result = count(world, loss);
  std::vector<NamedTensor> named;
  for (const auto& [name, part] : parts) named.push_back({name, part});
  result.weights = join(named, layout, world);
  return result;
}

// --- The judge ---------------------------------------------------------------

ReferenceRun mlp_on_one_device() { return train_one_device(options(mlp())); }

namespace {

/// All claims but the one about other sizes.
Verdict judge_task(const Lesson& lesson, int ranks, bool judges_memory) {
  Verdict verdict;
  std::vector<double> bill;
  for (int r = 0; r < ranks; ++r) bill.push_back(lesson.bill(r, ranks));
  // 1. Every rank ends, although no send is buffered
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  LaunchOptions launch;
  launch.rendezvous_sends = true;
  try {
    run_ranks(
        ranks,
        [&](ProcessGroup& world) {
          RankContext::current().device.reset_peak_memory();
          results[static_cast<std::size_t>(world.rank())] = lesson.train(world);
        },
        launch);
  } catch (const std::exception& error) {
    std::string why = error.what();
    if (why.find("does not receive yet") != std::string::npos) {
      why +=
          "; here, as with large messages, no send ends before it is received";
    }
    add_claim(verdict, "ends", false, why);
    verdict.text += fmt::format(
        "numbers  later  all weights must equal those of one device to 1e-12\n"
        "bytes    later  the bill is {}\n",
        by_rank(bill));
    return verdict;
  }
  // 2. The weights are those of one device
  RankContext context(Device::cpu(0), /*rank=*/0, /*num_threads=*/1);
  const RankContext::Scope scope(context);
  const ReferenceRun one_device =
      lesson.one_device ? lesson.one_device() : train_one_device(options());
  verdict.loss = results[0].loss;
  verdict.one_device_loss = one_device.losses.back();
  const auto [apart, name] =
      difference(results[0].weights, one_device.parameters);
  const bool is_equal = apart <= kTolerance;
  add_claim(
      verdict, "numbers", is_equal,
      fmt::format("loss {:.10f}, {:.10f} on one device; weights differ by "
                  "{:.0e}{}",
                  verdict.loss, verdict.one_device_loss, apart,
                  is_equal ? "" : ", most in " + name));
  // 3. Every rank sends what the bill says
  std::vector<double> bytes, peaks;
  bool is_as_billed = true;
  for (std::size_t r = 0; r < results.size(); ++r) {
    bytes.push_back(results[r].bytes);
    peaks.push_back(results[r].peak_bytes);
    is_as_billed &= std::abs(bytes[r] - bill[r]) < 0.5;
  }
  add_claim(
      verdict, "bytes", is_as_billed,
      "sent " + by_rank(bytes) +
          (is_as_billed ? ", as billed" : "; the bill is " + by_rank(bill)));
  // 4. No rank keeps more than the lesson does
  const double peak = *std::max_element(peaks.begin(), peaks.end());
  if (lesson.peak_bytes == 0 || !judges_memory) return verdict;
  add_claim(verdict, "memory", peak <= kMorePeak * lesson.peak_bytes,
            peak <= lesson.peak_bytes
                ? with_commas(lesson.peak_bytes) +
                      " bytes at the peak of a rank, or less"
                : fmt::format("{} bytes at the peak of a rank; at most {}: {} "
                              "times the lesson's {}",
                              with_commas(peak),
                              with_commas(kMorePeak * lesson.peak_bytes),
                              kMorePeak, with_commas(lesson.peak_bytes)));
  return verdict;
}

}  // namespace

Verdict judge(const Lesson& lesson, int ranks) {
  if (ranks != 0) return judge_task(lesson, ranks, /*judges_memory=*/false);
  Verdict verdict = judge_task(lesson, lesson.ranks.front(), true);
  const struct ShowAgain {
    ~ShowAgain() { task = kTasks; }
  } at_end;
  while (verdict.failed.empty() && ++task != std::end(kTasks)) {
    ranks = task == kTasks + 1 ? lesson.ranks.front() : lesson.ranks.back();
    const Verdict other = judge_task(lesson, ranks, false);
    if (other.failed.empty()) continue;
    const auto why = other.text.find("FAILS  ") + 7;
    add_claim(verdict, "sizes", false,
              fmt::format(
                  "on {}, {} samples of {} tokens, seed {}: {}",
                  how_many(ranks, "rank"), batch_size(), sequence(), task->seed,
                  other.text.substr(why, other.text.find('\n', why) - why)));
  }
  if (verdict.failed.empty()) {
    add_claim(verdict, "sizes", true,
              "the same with other models, batches, seeds" +
                  std::string(lesson.ranks.size() > 1 ? " and ranks" : ""));
  }
  return verdict;
}

int compare(const Lesson& lesson) {
  const Verdict verdict = judge(lesson);
  fmt::print("{}{}", word_of_judge, verdict.text);
  return verdict.failed.empty() ? 0 : 1;
}

void write_this(const std::string& function) {
  SB_FAIL(function, " is empty: write it; the comments in it say what it does");
}

}  // namespace shardbook::lesson
