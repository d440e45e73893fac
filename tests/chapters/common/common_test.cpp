// What all chapters share: data, configs, models, checkpoints, the loop.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

namespace files = std::filesystem;

/// A folder of its own for each test, gone afterwards.
class CommonFiles : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }

 private:
  TempFolder folder_;
};

/// The text of the Error has all these parts.
template <typename Statement>
void expect_error(const Statement& statement,
                  const std::vector<std::string>& parts) {
  std::string text;
  try {
    statement();
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_FALSE(text.empty()) << "nothing was thrown";
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos)
        << "'" << part << "' is not in: " << text;
  }
}

std::vector<std::int64_t> ints(const Tensor& x) {
  return x.to_vector<std::int64_t>();
}

using Ints = std::vector<std::int64_t>;

ModelConfig tiny() {
  ModelConfig config;
  config.vocab_size = 11;
  config.n_positions = 6;
  config.n_embd = 8;
  config.n_layer = 2;
  config.n_head = 2;
  return config;
}

InitOptions f64_init(std::uint64_t seed = 0) {
  InitOptions init;
  init.seed = seed;
  init.dtype = DType::kF64;
  return init;
}

// --- Data
// ----------------------------------------------------------------------

class DatasetFiles : public CommonFiles {};

TEST_F(DatasetFiles, SamplesFollowEachOtherAndWrapAtTheEnd) {
  // 10 bytes, samples of 3: 0..2, 3..5, 6..8; targets one further.
  const Dataset data =
      Dataset::open(write("ten", "0123456789"), 3, 256, /*seed=*/0);
  EXPECT_EQ(data.num_tokens(), 10);
  EXPECT_EQ(data.num_samples(), 3);
  const Batch first = data.batch(0, 2);
  EXPECT_EQ(ints(first.inputs), (Ints{'0', '1', '2', '3', '4', '5'}));
  EXPECT_EQ(ints(first.targets), (Ints{'1', '2', '3', '4', '5', '6'}));
  const Batch second = data.batch(1, 2);
  EXPECT_EQ(ints(second.inputs), (Ints{'6', '7', '8', '0', '1', '2'}));
  // Far beyond the end.
  EXPECT_EQ(ints(data.batch(300, 2).inputs), ints(first.inputs));
  EXPECT_EQ(first.inputs.memory_kind(), MemoryKind::kInput);
}

TEST_F(DatasetFiles, RanksReadRowsOfTheGlobalBatch) {
  const Dataset data = Dataset::open(
      write("text", std::string(100, 'a') + "bcdefghij"), 2, 256, 0);
  const Batch whole = data.batch(7, 6);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const Batch mine = data.batch(7, 6, BatchSlice{rank, 3}, 2);
    EXPECT_EQ(mine.slice.first, rank);
    EXPECT_EQ(mine.slice.stride, 3);
    for (std::int64_t i = 0; i < 2; ++i) {
      const std::int64_t row = rank + 3 * i;
      EXPECT_EQ(ints(mine.inputs.rows_view(i, i + 1)),
                ints(whole.inputs.rows_view(row, row + 1)));
      EXPECT_EQ(ints(mine.targets.rows_view(i, i + 1)),
                ints(whole.targets.rows_view(row, row + 1)));
    }
  }
}

TEST_F(DatasetFiles, TokenIdsAreLittleEndian) {
  const std::string bytes = {'\x01', '\x02', '\x50', '\xc4', '\x00', '\x00'};
  const Dataset data = Dataset::open(write("ids.u16", bytes), 2, 50257, 0);
  EXPECT_EQ(ints(data.batch(0, 1).inputs), (Ints{0x0201, 50256}));
  EXPECT_EQ(ints(data.batch(0, 1).targets), (Ints{50256, 0}));
}

TEST_F(DatasetFiles, ExactlyOneSampleIsEnough) {
  EXPECT_EQ(Dataset::open(write("a", "abcd"), 3, 256, 0).num_samples(), 1);
  expect_error([&] { Dataset::open(write("a", "abc"), 3, 256, 0); },
               {"3 tokens", "--seq 3", "need 4"});
}

TEST_F(DatasetFiles, BadOnesAreRefusedWithASentence) {
  expect_error([&] { Dataset::open(path("none"), 3, 256, 0); },
               {"none", "cannot be read", "No such file"});
  expect_error([&] { Dataset::open(write("e", ""), 3, 256, 0); },
               {"/e", "empty"});
  expect_error([&] { Dataset::open(write("odd.u16", "abc"), 1, 50257, 0); },
               {"odd.u16", "3 bytes", "16-bit"});
  expect_error([&] { Dataset::open(write("big", "abz"), 1, 'b' + 1, 0); },
               {"token 122", "position 2", "vocabulary of 99"});
  expect_error(
      [&] {
        Dataset::open(write("t.txt",
                            "ab\xff"
                            "cd"),
                      1, 256, 0);
      },
      {"t.txt", "byte 2", "UTF-8"});
  EXPECT_EQ(Dataset::open(write("t",
                                "ab\xff"
                                "cd"),
                          1, 256, 0)
                .num_tokens(),
            5);
  expect_error([&] { Dataset::open("random", 0, 256, 0); }, {"--seq 0"});
  expect_error([&] { Dataset::open(path(""), 3, 256, 0); }, {"cannot be read"});
}

TEST(Dataset, RandomTokensDependOnTheSeed) {
  auto draw = [](std::uint64_t seed) {
    return ints(Dataset::open("random", 64, 11, seed).batch(0, 4).inputs);
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
  for (std::int64_t token : draw(3)) {
    EXPECT_GE(token, 0);
    EXPECT_LT(token, 11);
  }
}

TEST(Dataset, AWalkGoesUpByOneToThree) {
  const auto draw = [](std::uint64_t seed) {
    const Batch batch = Dataset::open("walk", 64, 256, seed).batch(2, 4);
    const auto tokens = ints(batch.inputs), targets = ints(batch.targets);
    std::vector<std::int64_t> steps;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_LT(tokens[i], 32);
      steps.push_back((targets[i] - tokens[i] + 32) % 32);
    }
    return steps;
  };
  EXPECT_NE(draw(1), draw(2));
  const auto steps = draw(3);
  for (const std::int64_t step : {1, 2, 3}) {
    EXPECT_GT(std::count(steps.begin(), steps.end(), step), 64) << step;
  }
  EXPECT_EQ(std::count_if(steps.begin(), steps.end(),
                          [](std::int64_t s) { return s < 1 || s > 3; }),
            0);
}

TEST(Dataset, TheBookReadsItself) {
  const Dataset data = Dataset::open("book", 64, 256, 0);
  EXPECT_EQ(data.num_tokens(), static_cast<std::int64_t>(book_text().size()));
  EXPECT_EQ(utf8_problem(book_text()), "");
}

TEST(Dataset, OnMetaItHasShapes) {
  RankContext context(Device::meta());
  RankContext::Scope scope(context);
  const Batch batch = Dataset::open("random", 8, 256, 0).batch(3, 5);
  EXPECT_TRUE(batch.inputs.is_meta());
  EXPECT_EQ(batch.targets.shape(), (Shape{5, 8}));
}

TEST(Utf8, IsCheckedAsUnicodeSays) {
  EXPECT_EQ(utf8_problem("plain, \xc3\xa9, \xe4\xb8\xad, \xf0\x9f\x98\x80"),
            "");
  for (const std::string bad :
       {"\x80", "a\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_NE(utf8_problem(bad), "");
  }
}

// --- Configs
// -------------------------------------------------------------------

class ConfigFiles : public CommonFiles {};

TEST_F(ConfigFiles, AreRead) {
  const std::string file = write("c.json", tiny().to_json());
  EXPECT_EQ(ModelConfig::read(file).to_json(), tiny().to_json());
  files::create_directory(path("folder.json"));
  expect_error([&] { ModelConfig::read(path("folder.json")); },
               {"folder.json", "cannot be read"});
}

TEST(ModelConfig, SurvivesItsOwnJson) {
  ModelConfig config = tiny();
  config.layer_norm_epsilon = 1e-6;
  const ModelConfig again = ModelConfig::from_json(config.to_json(), "x");
  EXPECT_EQ(again.to_json(), config.to_json());
  EXPECT_EQ(again.n_embd, 8);
  EXPECT_EQ(again.layer_norm_epsilon, 1e-6);
  EXPECT_EQ(ModelConfig::from_json("{\"n_ctx\": 32}", "x").n_positions, 32);
}

TEST(ModelConfig, PublishedSizesHaveThePublishedParameters) {
  const std::vector<std::pair<std::string, std::int64_t>> published = {
      {"gpt2", 124439808},
      {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200}};
  InitOptions init;
  init.device = Device::meta();
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(make_model(ModelConfig::read(name), init)->num_parameters(),
              parameters)
        << name;
  }
}

TEST(ModelConfig, BadOnesAreRefusedWithASentence) {
  auto refuse = [](const std::string& json,
                   const std::vector<std::string>& parts) {
    SCOPED_TRACE(json);
    expect_error([&] { ModelConfig::from_json(json, "c.json"); }, parts);
  };
  refuse("", {"c.json", "not JSON"});
  refuse("{\"n_embd\": 4", {"not JSON"});
  refuse("[1]", {"not a JSON object"});
  refuse("{\"n_embd\": 0}", {"\"n_embd\" is 0", "positive integer"});
  refuse("{\"n_embd\": -4}", {"\"n_embd\" is -4"});
  refuse("{\"n_embd\": 1.5}", {"\"n_embd\" is 1.5"});
  refuse("{\"n_embd\": \"64\"}", {"\"n_embd\""});
  refuse("{\"n_layer\": 99999999999}", {"\"n_layer\""});
  refuse("{\"n_layer\": null}", {"\"n_layer\" is null"});
  refuse("{\"n_embd\": 10, \"n_head\": 4}", {"n_embd 10", "n_head 4"});
  refuse("{\"model_type\": \"llama\"}", {"llama", "gpt2"});
  refuse("{\"model_type\": 3}", {"\"model_type\" is 3"});
  refuse("{\"activation_function\": \"relu\"}", {"relu", "gelu_new"});
  refuse("{\"n_inner\": 7}", {"\"n_inner\" is 7"});
  refuse("{\"layer_norm_epsilon\": -1}", {"\"layer_norm_epsilon\" is -1"});
  refuse("{\"resid_pdrop\": 1}", {"\"resid_pdrop\" is 1"});
  refuse("{\"n_embd\": \"\xff\"}", {"UTF-8"});
  expect_error([] { ModelConfig::read("gpt-huge"); },
               {"--model gpt-huge", "gpt-nano", "FILE.json"});
  expect_error([] { ModelConfig::read("none.json"); },
               {"none.json", "cannot be read"});
}

// --- Models
// --------------------------------------------------------------------

Tensor tiny_tokens() {
  return Tensor::from_values<std::int64_t>({1, 5, 10, 0, 3, 3, 7, 2}, {2, 4});
}
Tensor tiny_targets() {
  return Tensor::from_values<std::int64_t>({5, 10, 0, 2, 3, 7, 2, 9}, {2, 4});
}

/// Weights large enough that every gradient can be seen.
void spread(Module& model) {
  std::uint64_t stream = 0;
  for (const Tensor& p : model.parameters()) {
    fill_normal(p, 17, ++stream, 0.1, 0.4);
  }
}

TEST(Gpt, GradientsEqualDifferences) {
  for (bool recompute : {false, true}) {
    Gpt model(tiny(), f64_init());
    spread(model);
    set_recompute(model, recompute);
    EXPECT_LT(autograd::check_gradients(
                  [&](const Tensors&) {
                    return language_loss(model(tiny_tokens()), tiny_targets());
                  },
                  model.parameters()),
              1e-7);
  }
}

TEST(Gpt, GradientsWithDropoutEqualDifferences) {
  ModelConfig config = tiny();
  config.dropout = 0.2;
  Gpt model(config, f64_init());
  spread(model);
  EXPECT_LT(autograd::check_gradients(
                [&](const Tensors&) {
                  ContextValue<RandomState> same(&RankContext::random,
                                                 RandomState{3, 1, 0, {}});
                  return language_loss(model(tiny_tokens()), tiny_targets());
                },
                model.parameters()),
            1e-7);
}

TEST(MlpModel, GradientsEqualDifferences) {
  ModelConfig config = tiny();
  config.type = "mlp";
  MlpModel model(config, f64_init());
  EXPECT_LT(autograd::check_gradients(
                [&](const Tensors&) {
                  return language_loss(model(tiny_tokens()), tiny_targets());
                },
                model.parameters()),
            1e-6);
}

TEST(Gpt, HasThePublishedNames) {
  Gpt model(tiny(), f64_init());
  std::vector<std::string> names;
  for (const NamedTensor& p : model.named_parameters()) names.push_back(p.name);
  EXPECT_EQ(names.size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(names.front(), "transformer.wte.weight");
  EXPECT_EQ(names[2], "transformer.h.0.ln_1.weight");
  EXPECT_EQ(names[4], "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(names.back(), "transformer.ln_f.bias");
  EXPECT_EQ(model.named_parameters()[4].tensor.shape(), (Shape{8, 24}));
}

TEST(Gpt, DoesNotSeeTheFuture) {
  Gpt model(tiny(), f64_init());
  spread(model);
  const Tensor a = tiny_tokens(), b = a.clone();
  b.data<std::int64_t>()[3] = 9;  // the last token of the first row
  const Tensor ya = model(a), yb = model(b);
  EXPECT_TRUE(bitwise_equal(slice(slice(ya, 0, 0, 1), 1, 0, 3).detach(),
                            slice(slice(yb, 0, 0, 1), 1, 0, 3).detach()));
  EXPECT_GT(max_abs_difference(ya, yb), 1e-3);
}

TEST(Gpt, RefusesMoreTokensThanPositions) {
  Gpt model(tiny(), f64_init());
  expect_error(
      [&] {
        model(Tensor::zeros({1, 7}, {DType::kI64, Device()}));
      },
      {"7 tokens", "6 positions"});
}

TEST(Gpt, BeginsNearTheEntropyOfItsVocabulary) {
  Gpt model(tiny(), f64_init());
  const double loss =
      language_loss(model(tiny_tokens()), tiny_targets()).item();
  EXPECT_NEAR(loss, std::log(11.0), 0.05);
}

// --- Checkpoints
// -----------------------------------------------------------------

class ModelFiles : public CommonFiles {};

TEST_F(ModelFiles, BringBackEveryBit) {
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), f64_init(2));
  save_model(path("m.safetensors"), saved, tiny());
  load_model(path("m.safetensors"), loaded);
  const auto a = saved.named_parameters(), b = loaded.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(a[i].tensor, b[i].tensor)) << a[i].name;
  }
  EXPECT_EQ(config_of_file(path("m.safetensors")).to_json(), tiny().to_json());
}

TEST_F(ModelFiles, AreConvertedToTheModelsDtype) {
  InitOptions bf16;
  bf16.dtype = DType::kBF16;
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), bf16);
  save_model(path("m.safetensors"), saved, tiny());
  load_model(path("m.safetensors"), loaded);
  EXPECT_EQ(loaded.wte.as<Embedding>().weight.dtype(), DType::kBF16);
  EXPECT_LT(max_abs_difference(loaded.wte.as<Embedding>().weight,
                               saved.wte.as<Embedding>().weight),
            1e-3);
}

TEST_F(ModelFiles, MayLackTheNameOfTheWhole) {
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), f64_init(2));
  std::vector<NamedTensor> bare = saved.named_parameters();
  for (NamedTensor& entry : bare) {
    entry.name = entry.name.substr(std::string("transformer.").size());
  }
  save_tensors(path("bare.safetensors"), bare);
  load_model(path("bare.safetensors"), loaded);
  EXPECT_TRUE(bitwise_equal(loaded.wpe.weight, saved.wpe.weight));
}

TEST_F(ModelFiles, ThatDoNotFitAreRefusedAndChangeNothing) {
  ModelConfig wide = tiny();
  wide.n_positions = 7;
  Gpt saved(wide, f64_init(1)), model(tiny(), f64_init(2));
  const Tensor before = model.wte.as<Embedding>().weight.clone();
  save_model(path("wide.safetensors"), saved, wide);
  expect_error(
      [&] { load_model(path("wide.safetensors"), model); },
      {"wide.safetensors", "'transformer.wpe.weight'", "[7, 8]", "[6, 8]"});
  EXPECT_TRUE(bitwise_equal(model.wte.as<Embedding>().weight, before));

  std::vector<NamedTensor> some = model.named_parameters();
  some.pop_back();
  save_tensors(path("some.safetensors"), some);
  expect_error([&] { load_model(path("some.safetensors"), model); },
               {"some.safetensors", "'transformer.ln_f.bias'"});
  some = model.named_parameters();
  some[0].tensor = Tensor::zeros({11, 8}, {DType::kI64, Device()});
  save_tensors(path("ints.safetensors"), some);
  expect_error([&] { load_model(path("ints.safetensors"), model); },
               {"'transformer.wte.weight'", "I64", "BF16"});
  EXPECT_TRUE(bitwise_equal(model.wte.as<Embedding>().weight, before));
  expect_error([&] { load_model(path("none.safetensors"), model); },
               {"none.safetensors"});
  expect_error([&] { config_of_file(path("some.safetensors")); },
               {"config", "--model"});
}

// --- The loop
// ---------------------------------------------------------------------

Options tiny_run() {
  Options options;
  options.model = "gpt-nano";
  options.data = "random";
  options.dtype = DType::kF64;
  options.batch = 6;
  options.seq = 5;
  options.steps = 3;
  return options;
}

TEST(Training, DependsOnTheSeedAlone) {
  const Options options = tiny_run();
  const ReferenceRun a = train_one_device(options);
  RankContext::current().random = {9, 9, 9, {9, 9}};
  const ReferenceRun b = train_one_device(options);
  EXPECT_EQ(a.losses, b.losses);
  Options other = options;
  other.seed = 5;
  EXPECT_NE(train_one_device(other).losses, a.losses);
}

TEST(Training, LearnsWhatItRepeats) {
  Options options = tiny_run();
  options.steps = 12;
  options.dtype = DType::kF32;
  options.optimizer_options.lr = 1e-2;
  options.data = "book";
  options.batch = 24;
  const ReferenceRun run = train_one_device(options);
  EXPECT_LT(run.losses.back(), run.losses.front() - 0.5);
}

TEST(Training, RefusesMoreMicroBatchesThanSamples) {
  expect_error([] { train_one_device(tiny_run(), 7); },
               {"--micro-batches 7", "1 to 6"});
  Options options = tiny_run();
  options.seq = 257;
  expect_error([&] { build_model(options); }, {"--seq 257", "256 positions"});
}

// --- The claim about numbers ------------------------------------------------

/// Losses and one parameter of a run, beside 2 and {1, 2} on one device.
bool passes(double loss, const std::vector<double>& values,
            DType dtype = DType::kF64) {
  Options options;
  options.dtype = dtype;
  options.steps = 1;
  const auto parameter = [&](const std::vector<double>& of) {
    const Tensor tensor = Tensor::empty({2}, {dtype, Device()});
    tensor.copy_from(Tensor::from_values<double>(of, {2}));
    return std::vector<NamedTensor>{{"w", tensor}};
  };
  ReferenceRun one;
  one.losses = {2};
  one.parameters = parameter({1, 2});
  return compare_with_one_device(options, {loss}, parameter(values), one)
      .passed;
}

TEST(ParityClaim, FailsForWhatDiffersAndForWhatIsNoNumber) {
  const double nan = std::nan("");
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    EXPECT_TRUE(passes(2, {1, 2}, dtype));
    EXPECT_FALSE(passes(2.5, {1, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(2, {1.5, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(nan, {1, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(2, {1, nan}, dtype)) << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace shardbook
