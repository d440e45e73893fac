// Loops of Accelerate itself, and of its libraries: batches, losses, norms and
// rates are the originals'. tests/pytorch/accelerate_loops.py has stored them.

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/chapters/15_engine/accelerator_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::accelerate {
namespace {

using nlohmann::json;

/// The originals computed in f64, and under DeepSpeed in f32.
double tolerance_of(const json& loop) {
  return has_text(loop["plugin"], "deepspeed") ? 1e-6 : 1e-10;
}

struct Original {
  std::string name;
  json loop;
  int ranks = 1;
};

json stored_loops() {
  std::ifstream file(SHARDBOOK_ROOT
                     "/tests/chapters/15_engine/accelerate_loops.json");
  return json::parse(file);
}

/// Megatron-LM needs GPUs. Its ranks that share a model are one process of the
/// original.
std::vector<Original> originals() {
  const std::vector<std::pair<std::string, std::string>> megatron = {
      {"Ddp", "megatron 2 1"},
      {"ShortWindow", "megatron 1 2"},
      {"NoClipping", "megatron 2 1"},
      {"SavedAndLoaded", "megatron 1 2"}};
  std::vector<Original> all;
  for (json loop : stored_loops()) {
    const std::string name = loop["name"];
    all.push_back({name, loop, loop["ranks"]});
    for (const auto& [original, plugin] : megatron) {
      if (original != name) continue;
      loop["plugin"] = plugin;
      all.push_back({"Megatron" + name, loop, 2 * loop["ranks"].get<int>()});
    }
  }
  return all;
}

Plugin plugin_of(const json& loop) {
  std::istringstream words(loop["plugin"].get<std::string>());
  std::string library, choice;
  words >> library >> choice;
  if (library == "fsdp" || library == "fsdp2") {
    return FullyShardedDataParallelPlugin{
        .fsdp_version = library == "fsdp" ? 1 : 2, .sharding_strategy = choice};
  }
  if (library == "deepspeed") {
    return DeepSpeedPlugin{.zero_stage = std::stoi(choice),
                           .gradient_clipping = loop["max_norm"].get<double>()};
  }
  if (library == "megatron") {
    MegatronLMPlugin plugin{.tp_degree = std::stoi(choice)};
    words >> plugin.pp_degree;
    plugin.num_micro_batches = plugin.pp_degree;
    return plugin;
  }
  return DistributedDataParallelPlugin{};
}

// Weights and samples need no generator: the script has the same formulas.

std::unique_ptr<Gpt> tiny_gpt() {
  InitOptions init;
  init.dtype = DType::kF64;
  auto gpt =
      std::make_unique<Gpt>(ModelConfig::from_json(kTinyGpt, "tiny"), init);
  std::map<std::string, Tensor> by_name;
  for (const NamedTensor& each : gpt->named_parameters()) {
    by_name[each.name] = each.tensor;
  }
  std::int64_t i = 0;
  const NoGrad no_grad;
  for (const auto& [name, tensor] : by_name) {
    const bool is_scale = has_text(name, "ln_") && has_text(name, "weight");
    std::vector<double> values;
    for (std::int64_t k = 0; k < tensor.numel(); ++k) {
      // The original's weights begin in f32
      values.push_back(static_cast<float>(
          double((k * 37 + i * 11) % 101 - 50) / 500 + is_scale));
    }
    tensor.copy_from(Tensor::from_values(values, tensor.shape()));
    i += 1;
  }
  return gpt;
}

Batch samples_batch(const std::vector<std::int64_t>& samples) {
  constexpr std::int64_t kSeq = 8, kVocabulary = 32;
  std::vector<std::int64_t> inputs, targets;
  for (const std::int64_t i : samples) {
    for (std::int64_t t = 0; t < kSeq; ++t) {
      const auto token = [&](std::int64_t at) {
        return (5 * i + (1 + i % 3) * at) % kVocabulary;
      };
      inputs.push_back(token(t));
      targets.push_back(token(t + 1));
    }
  }
  const Shape shape = {static_cast<std::int64_t>(samples.size()), kSeq};
  return {Tensor::from_values(inputs, shape),
          Tensor::from_values(targets, shape),
          {}};
}

struct Result {
  std::vector<std::vector<std::int64_t>> batches;
  std::vector<double> losses, norms, rates;
  std::vector<std::int64_t> seen;
  double evaluation = 0;
};

/// Adds the mean loss over all samples, and their numbers.
void evaluate(Accelerator& acc, PreparedModel& model, std::int64_t batch_size,
              Result& result) {
  constexpr std::int64_t kSamples = 11;
  PreparedLoader loader =
      acc.prepare(DataLoader{{kSamples, samples_batch}, batch_size});
  const NoGrad no_grad;
  for (std::size_t i = 0; const auto batch = loader.next(); ++i) {
    const std::vector<std::int64_t>& mine = loader.batches()[i];
    const auto rows = static_cast<std::int64_t>(mine.size());
    const Tensor loss = model.loss(*batch);
    for (const std::int64_t each :
         acc.gather_for_metrics(Tensor::from_values(mine, {rows}))
             .to_vector<std::int64_t>()) {
      result.seen.push_back(each);
    }
    for (const double each :
         acc.gather_for_metrics(
                Tensor::full({rows}, loss.item(), loss.options()))
             .to_vector<double>()) {
      result.evaluation += each / kSamples;
    }
  }
}

/// The loop of the documents, from `folder` if it has a state. With `stop`, it
/// saves one there after some windows, and ends.
void run_loop(const json& loop, const std::string& folder, bool loads,
              bool stops, ProcessGroup& world, Result& result) {
  AcceleratorOptions options;
  options.plugin = plugin_of(loop);
  options.gradient_accumulation_steps = loop["accumulation"];
  options.split_batches = loop["split_batches"];
  options.even_batches = loop["even_batches"];
  engine::OptimizerConfig optimizer;
  optimizer.type = loop["optimizer"];
  const double lr = optimizer.params.lr = loop["lr"];
  if (optimizer.type == "AdamW") optimizer.params.weight_decay = 0.01;
  DataLoader samples;
  samples.data = {loop["samples"], samples_batch};
  samples.batch_size = loop["batch_size"];
  samples.drop_last = loop["drop_last"];
  Scheduler schedule;
  schedule.native = std::make_shared<engine::LrScheduler>(
      [lr](std::int64_t k) { return lr / (1 + 0.1 * double(k)); });
  const double max_norm = loop["max_norm"];
  const bool clips =
      max_norm > 0 || std::holds_alternative<DeepSpeedPlugin>(options.plugin);

  const auto gpt = tiny_gpt();
  Accelerator acc(options, world);
  auto [model, opt, loader, sched] =
      acc.prepare(*gpt, optimizer, samples, schedule);
  if (loads) acc.load_state(folder);
  if (!loads) result.batches = loader.batches();
  double window = 0;
  while (loader.epoch() < loop["epochs"].get<std::int64_t>()) {
    const std::optional<Batch> batch = loader.next();
    if (!batch) continue;
    const auto micro_step = acc.accumulate(model);
    const Tensor loss = model.loss(*batch);
    window += acc.reduce(loss, "mean").item();
    const double rate = sched.get_last_lr();
    acc.backward(loss);
    double norm = 0;
    if (acc.sync_gradients() && clips) {
      norm = *acc.clip_grad_norm_(model.parameters(), max_norm);
    }
    opt.step();
    sched.step();
    opt.zero_grad();
    if (!acc.sync_gradients()) continue;
    result.losses.push_back(window /
                            double(options.gradient_accumulation_steps));
    result.norms.push_back(norm);
    result.rates.push_back(rate);
    window = 0;
    if (stops && result.losses.size() == loop["stop_after"]) {
      acc.save_state(folder);
      return;
    }
  }
  evaluate(acc, model, samples.batch_size, result);
}

void expect_near(const std::vector<double>& found, const json& loop,
                 const std::string& name) {
  const auto stored = loop[name].get<std::vector<double>>();
  ASSERT_EQ(found.size(), stored.size()) << name;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], stored[i], tolerance_of(loop)) << name << " " << i;
  }
}

class AcceleratorOriginals : public testing::TestWithParam<Original> {};

TEST_P(AcceleratorOriginals, BatchesLossesNormsAndRatesAreTheirs) {
  const auto& [name, loop, num_ranks] = GetParam();
  const TempFolder folder;
  const std::string state = folder / "state";
  const bool is_cut = loop["stop_after"] > 0;
  std::vector<Result> ranks(static_cast<std::size_t>(num_ranks));
  for (const bool again : {false, true}) {
    if (again && !is_cut) break;
    on_ranks(num_ranks, [&](ProcessGroup& world) {
      run_loop(loop, state, again, is_cut && !again, world,
               ranks[static_cast<std::size_t>(world.rank())]);
    });
  }
  const int sharing = num_ranks / loop["ranks"].get<int>();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Result& result = ranks[static_cast<std::size_t>(rank)];
    // Ranks that share a model read the same batches: tp is the innermost
    // axis, pp the outermost one
    const bool is_pipeline = loop["plugin"] == "megatron 1 2";
    const int process =
        is_pipeline ? rank % loop["ranks"].get<int>() : rank / sharing;
    EXPECT_EQ(json(result.batches), loop["batches"].at(std::size_t(process)));
    expect_near(result.losses, loop, "losses");
    expect_near(result.norms, loop, "norms");
    expect_near(result.rates, loop, "rates");
    EXPECT_EQ(json(result.seen), loop["seen"]);
    EXPECT_NEAR(result.evaluation, loop["evaluation"].get<double>(),
                tolerance_of(loop));
  }
}

INSTANTIATE_TEST_SUITE_P(All, AcceleratorOriginals,
                         testing::ValuesIn(originals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardbook::accelerate
