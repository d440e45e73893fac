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
    return Fsdp{.fsdp_version = library == "fsdp" ? 1 : 2,
                .sharding_strategy = choice};
  }
  if (library == "deepspeed") {
    return DeepSpeed{.zero_stage = std::stoi(choice),
                     .gradient_clipping = loop["max_norm"].get<double>()};
  }
  if (library == "megatron") {
    Megatron plugin{.tp_degree = std::stoi(choice)};
    words >> plugin.pp_degree;
    plugin.num_micro_batches = plugin.pp_degree;
    return plugin;
  }
  return Ddp{};
}

// Weights and samples need no generator: the script has the same formulas.

std::shared_ptr<Module> tiny_gpt() {
  InitOptions init;
  init.dtype = DType::kF64;
  auto gpt =
      std::make_shared<Gpt>(ModelConfig::from_json(kTinyGpt, "tiny"), init);
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

struct Evaluation {
  std::vector<std::int64_t> seen;
  double loss = 0;
};

/// The mean loss over all samples, and their numbers.
Evaluation evaluate(Accelerator& acc, PreparedModel& model,
                    std::int64_t batch_size) {
  constexpr std::int64_t kSamples = 11;
  Evaluation result;
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
      result.loss += each / kSamples;
    }
  }
  return result;
}

/// The loop of the documents.
Script script_of(const json& loop) {
  Script script;
  script.options.plugin = plugin_of(loop);
  script.options.gradient_accumulation_steps = loop["accumulation"];
  script.options.split_batches = loop["split_batches"];
  script.options.even_batches = loop["even_batches"];
  script.batch_size = loop["batch_size"];
  script.samples = loop["samples"];
  script.epochs = loop["epochs"];
  script.drop_last = loop["drop_last"];
  script.max_norm = loop["max_norm"];
  script.asks_norm = std::holds_alternative<DeepSpeed>(script.options.plugin);
  script.optimizer.type = loop["optimizer"];
  const double lr = script.optimizer.params.lr = loop["lr"];
  const bool decays = script.optimizer.type == "AdamW";
  if (decays) script.optimizer.params.weight_decay = 0.01;
  script.rate = [lr](std::int64_t k) { return lr / (1 + 0.1 * double(k)); };
  script.make_model = tiny_gpt;
  script.batch = samples_batch;
  return script;
}

class AcceleratorOriginals : public testing::TestWithParam<Original> {};

TEST_P(AcceleratorOriginals, BatchesLossesNormsAndRatesAreTheirs) {
  const auto& [name, loop, num_ranks] = GetParam();
  Script script = script_of(loop);
  std::vector<Evaluation> evaluations(static_cast<std::size_t>(num_ranks));
  script.at_end = [&](Accelerator& acc, PreparedModel& model) {
    evaluations[static_cast<std::size_t>(RankContext::current().rank)] =
        evaluate(acc, model, script.batch_size);
  };
  // Some are saved after so many windows, and go on
  const TempFolder folder;
  std::vector<std::vector<Trace>> parts;
  if (loop["stop_after"] > 0) {
    script.stop_after = loop["stop_after"];
    script.save_to = folder / "state";
    parts.push_back(run_on(num_ranks, script));
    script.stop_after = 0;
    script.load_from = script.save_to;
  }
  parts.push_back(run_on(num_ranks, script));
  const int sharing = num_ranks / loop["ranks"].get<int>();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const auto expect_theirs =
        [&, &loop = loop](const char* key, std::vector<double> Trace::*values) {
          std::vector<double> found;
          for (const std::vector<Trace>& part : parts) {
            const std::vector<double>& more = part[at].*values;
            found.insert(found.end(), more.begin(), more.end());
          }
          EXPECT_LT(largest_gap(found, loop[key].get<std::vector<double>>()),
                    tolerance_of(loop))
              << key;
        };
    // Ranks that share a model read the same batches: tp is the innermost
    // axis, pp the outermost one
    const bool is_pipeline = loop["plugin"] == "megatron 1 2";
    const int process =
        is_pipeline ? rank % loop["ranks"].get<int>() : rank / sharing;
    EXPECT_EQ(json(parts[0][at].batches[0]),
              loop["batches"].at(std::size_t(process)));
    expect_theirs("losses", &Trace::losses);
    expect_theirs("norms", &Trace::norms);
    expect_theirs("rates", &Trace::rates);
    EXPECT_EQ(json(evaluations[at].seen), loop["seen"]);
    EXPECT_NEAR(evaluations[at].loss, loop["evaluation"].get<double>(),
                tolerance_of(loop));
  }
}

INSTANTIATE_TEST_SUITE_P(All, AcceleratorOriginals,
                         testing::ValuesIn(originals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardbook::accelerate
