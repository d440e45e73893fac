// ResNets: torchvision's names and sizes, layers as a list, images as data.

#include "chapters/common/models/resnet.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "chapters/00_single_device/single_device.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/data.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "core/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

constexpr char kBasic[] =
    R"({"model_type": "resnet", "depths": [1, 2], "embedding_size": 8,
        "num_labels": 10})";
constexpr char kBottleneck[] =
    R"({"model_type": "resnet", "depths": [1, 1, 1], "embedding_size": 4,
        "layer_type": "bottleneck", "num_labels": 7})";

std::unique_ptr<Module> on_meta(const std::string& name) {
  InitOptions init;
  init.device = Device::meta();
  return make_model(ModelConfig::read(name), init);
}

Options image_options(const std::string& model) {
  Options options;
  options.model = model;
  options.data = "random";
  options.image_size = 32;
  options.batch = 6;
  options.seq = 1;
  options.steps = 2;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.05;
  return options;
}

TEST(ResNet, HasTorchvisionsNamesAndSizes) {
  const auto small = on_meta("resnet18"), large = on_meta("resnet50");
  EXPECT_EQ(small->num_parameters(), 11689512);
  EXPECT_EQ(large->num_parameters(), 25557032);
  EXPECT_EQ(small->named_parameters().size(), 62u);
  EXPECT_EQ(large->named_parameters().size(), 161u);
  EXPECT_EQ(large->named_buffers().size(), 106u);
  std::map<std::string, Shape> shapes;
  for (const NamedTensor& each : large->named_parameters()) {
    shapes[each.name] = each.tensor.shape();
  }
  EXPECT_EQ(shapes.at("conv1.weight"), (Shape{64, 3, 7, 7}));
  EXPECT_EQ(shapes.at("bn1.bias"), (Shape{64}));
  EXPECT_EQ(shapes.at("layer1.0.downsample.0.weight"), (Shape{256, 64, 1, 1}));
  EXPECT_EQ(shapes.at("layer2.3.conv2.weight"), (Shape{128, 128, 3, 3}));
  EXPECT_EQ(shapes.at("layer4.2.bn3.weight"), (Shape{2048}));
  EXPECT_EQ(shapes.at("fc.weight"), (Shape{1000, 2048}));
  EXPECT_EQ(large->named_buffers()[0].name, "bn1.running_mean");
}

TEST(ResNet, SizeIsTheModels) {
  for (const std::string name : {"resnet18", "resnet50", kBasic, kBottleneck}) {
    const auto model = on_meta(name);
    double statistics = 0;
    for (const Tensor& buffer : model->buffers()) {
      statistics += static_cast<double>(buffer.numel());
    }
    const ResNetSize size = resnet_size(ModelConfig::read(name));
    EXPECT_EQ(size.trained, static_cast<double>(model->num_parameters()));
    EXPECT_EQ(size.statistics, statistics);
  }
}

// The model-parallel chapter's experiment cuts after layer2.
TEST(ResNet, ImagesOf128LeaveLayer2With131072Values) {
  const auto layers = layers_of(ModelConfig::read("resnet50"));
  ASSERT_EQ(layers->size(), 18);
  EXPECT_EQ(layers->name(8), "layer3.0");
  const Tensor images =
      Tensor::empty({120, 3, 128, 128}, {DType::kF32, Device::meta()});
  const auto inputs = trace_shapes(*layers, {images}, DType::kF32);
  EXPECT_EQ(inputs[8].values[0].shape, (Shape{120, 16, 16, 512}));
  EXPECT_TRUE(inputs[8].values[0].needs_grad);
  EXPECT_EQ(inputs[18].values[0].shape, (Shape{120, 1000}));
}

TEST(ResNet, LayersOneByOneAreTheModel) {
  for (const char* text : {kBasic, kBottleneck}) {
    const ModelConfig config = ModelConfig::read(text);
    InitOptions init;
    init.seed = 3;
    const auto model = make_model(config, init);
    const auto layers = layers_of(config);
    const int cut = layers->size() / 2;
    Stage first(*layers, 0, cut, init);
    Stage second(*layers, cut, layers->size(), init);
    const Batch batch = Dataset::open(image_options(text), config).batch(0, 6);
    language_loss((*model)(batch.inputs), batch.targets).backward();
    language_loss(second(first(batch.inputs)), batch.targets).backward();
    std::map<std::string, Tensor> expected;
    for (const NamedTensor& each : model->named_parameters()) {
      expected[each.name] = each.tensor;
    }
    std::size_t found = 0;
    for (Stage* stage : {&first, &second}) {
      for (const NamedTensor& each : stage->named_parameters()) {
        const Tensor& whole = expected.at(each.name);
        EXPECT_TRUE(bitwise_equal(each.tensor, whole)) << each.name;
        EXPECT_TRUE(bitwise_equal(each.tensor.grad(), whole.grad()))
            << each.name;
        found += 1;
      }
    }
    EXPECT_EQ(found, expected.size());
  }
}

TEST(ResNet, AnImageAloneIsTheSameInEvaluation) {
  Deterministic deterministic;
  const auto model = make_model(ModelConfig::read(kBottleneck), InitOptions{});
  model->train(false);
  NoGrad no_grad;
  const Batch batch =
      Dataset::open(image_options(kBottleneck), ModelConfig::read(kBottleneck))
          .batch(0, 4);
  const Tensor all = (*model)(batch.inputs);
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(bitwise_equal((*model)(batch.inputs.rows_view(i, i + 1)),
                              all.rows_view(i, i + 1)));
  }
}

void expect_equal(const std::vector<NamedTensor>& a,
                  const std::vector<NamedTensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(a[i].tensor, b[i].tensor)) << a[i].name;
  }
}

/// Trains two steps on one device, then passes it to `look`.
void train_alone(
    const Options& options, const single_device::SingleDeviceOptions& setup,
    const std::function<void(single_device::SingleDevice&)>& look) {
  RankContext context(Device::cpu(0), /*rank=*/0, /*num_threads=*/1);
  const RankContext::Scope scope(context);
  single_device::SingleDevice device(options, setup);
  train(options, device.optimizer(), false,
        [&](std::int64_t k) { return device.step(k); });
  look(device);
}

TEST(ResNet, RecomputationChangesNothing) {
  for (const char* text : {kBasic, kBottleneck}) {
    std::vector<NamedTensor> states[2];
    for (const bool recompute : {false, true}) {
      train_alone(image_options(text),
                  {.num_micro_batches = 2, .recompute = recompute},
                  [&](single_device::SingleDevice& device) {
                    states[recompute] = state_of(*device.model().model);
                  });
    }
    expect_equal(states[0], states[1]);
  }
}

// Deferred statistics equal the whole batch's after its last piece. Catches a
// sum of pieces that is never committed.
TEST(ResNet, PiecesCommitDeferredStatistics) {
  Options options = image_options(kBasic);
  options.dtype = DType::kF64;
  RankContext context(Device::cpu(0), 0, 1);
  const RankContext::Scope scope(context);
  const auto means = [&](std::int64_t pieces) {
    const LoadedModel loaded = build_model(options);
    defer_batch_norms(*loaded.model);
    const Dataset data = Dataset::open(options, loaded.config);
    accumulate_gradients(options, *loaded.model, data, 0, pieces);
    return loaded.model->buffers().at(0).to_vector<double>();
  };
  const auto whole = means(1), three = means(3);
  ASSERT_EQ(three.size(), whole.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NE(whole[i], 0) << "has moved";
    // Only the first norm reads values that do not depend on the pieces
    EXPECT_NEAR(three[i], whole[i], 1e-12);
  }
}

TEST(ResNet, BillIsCounted) {
  for (const char* text : {kBasic, kBottleneck}) {
    for (const int pieces : sized<int>({1, 3}, {3})) {
      Options options = image_options(text);
      options.optimizer = "adamw";
      train_alone(
          options, {.num_micro_batches = pieces},
          [&](single_device::SingleDevice& device) {
            const RankReport report = rank_report(
                device.bills()[0], 0, RankContext::current().device);
            for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
              EXPECT_EQ(report.held[k].counted, report.held[k].predicted)
                  << held_name(static_cast<MemoryKind>(k)) << " in " << pieces;
            }
          });
    }
  }
}

std::vector<std::string> names_in(const std::string& path) {
  return CheckpointReader::open(path).names();
}

// In a file for transformers' class, torchvision's names would be loaded as
// random weights.
TEST(ResNet, FilesClaimTheClassThatHasTheirNames) {
  const TempFolder folder;
  const std::string path = folder / "resnet.safetensors";
  for (const char* text : {kBasic, kBottleneck}) {
    const ModelConfig config = ModelConfig::read(text);
    InitOptions init, other;
    init.seed = 1, other.seed = 2;
    const auto model = make_model(config, init);
    (*model)(Dataset::open(image_options(text), config).batch(0, 6).inputs);
    std::set<std::string> expected;
    for (const NamedTensor& each : state_of(*model)) expected.insert(each.name);
    save_model(path, *model, config);
    auto names = names_in(path);
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()), expected);
    const auto expect_as_saved = [&](const std::string& architecture) {
      const std::string text =
          CheckpointReader::open(path).metadata().at("config");
      expect_text(text, {"\"architectures\":[\"" + architecture + "\"]"});
      EXPECT_EQ(ModelConfig::from_json(text, path).to_json(), config.to_json());
      const auto copy = make_model(config, other);
      load_model(path, *copy);
      expect_equal(state_of(*model), state_of(*copy));
    };
    expect_as_saved("ResNet");

    save_model(path, *model, config, WeightNames::kTransformers);
    expect_as_saved("ResNetForImageClassification");
    names = names_in(path);
    const std::set<std::string> theirs(names.begin(), names.end());
    std::vector<std::string> some = {
        "resnet.embedder.embedder.convolution.weight",
        "resnet.embedder.embedder.normalization.running_var",
        "resnet.embedder.embedder.normalization.num_batches_tracked",
        "resnet.encoder.stages.0.layers.0.layer.1.convolution.weight",
        "resnet.encoder.stages.1.layers.0.layer.0.normalization.bias",
        "resnet.encoder.stages.1.layers.0.shortcut.convolution.weight",
        "resnet.encoder.stages.1.layers.0.shortcut.normalization.running_mean",
        "classifier.1.weight",
        "classifier.1.bias"};
    for (const std::string& name : some) {
      EXPECT_EQ(theirs.count(name), 1u) << name;
    }
    // A count of batches for each norm
    std::size_t norms = 0;
    for (const std::string& name : theirs) {
      norms += name.find("num_batches_tracked") != std::string::npos;
    }
    EXPECT_EQ(norms, model->buffers().size() / 2);
    EXPECT_EQ(theirs.size(), expected.size() + norms);
  }
}

TEST(ResNetConfig, RefusesWhatIsNoResNet) {
  const auto read = [](const std::string& rest) {
    return error_of([&] {
      ModelConfig::read(R"({"model_type": "resnet", )" + rest + "}");
    });
  };
  expect_text(read(R"("depths": [2, 0])"), {"\"depths\" is [2,0]"});
  expect_text(read(R"("depths": [])"), {"\"depths\""});
  expect_text(read(R"("layer_type": "wide")"), {"\"bottleneck\""});
  expect_text(read(R"("num_labels": -1)"), {"\"num_labels\""});
  expect_text(read(R"("embedding_size": 1000000)"), {"\"embedding_size\""});
  Options options = image_options("resnet18");
  options.dropout = 0.5;
  expect_text(error_of([&] { model_config(options); }), {"--dropout"});
  expect_text(error_of([&] { refuse_image_models(options, "because"); }),
              {"--model resnet18: because"});
  options = image_options(kBasic);
  options.data = "book";
  expect_text(
      error_of([&] { Dataset::open(options, ModelConfig::read(kBasic)); }),
      {"--data random"});
}

TEST(Images, DependOnTheSampleAlone) {
  Options options = image_options(kBasic);
  const ModelConfig config = ModelConfig::read(kBasic);
  const Dataset data = Dataset::open(options, config);
  const Batch whole = data.batch(1, 6);
  EXPECT_EQ(whole.inputs.shape(), (Shape{6, 3, 32, 32}));
  const Batch some = data.batch(1, 6, {1, 2}, 3);
  const auto labels = whole.targets.to_vector<std::int64_t>();
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(bitwise_equal(some.inputs.rows_view(i, i + 1),
                              whole.inputs.rows_view(1 + 2 * i, 2 + 2 * i)));
    EXPECT_EQ(
        some.targets.to_vector<std::int64_t>()[static_cast<std::size_t>(i)],
        labels[static_cast<std::size_t>(1 + 2 * i)]);
  }
  // Another step, another seed: other images
  EXPECT_GT(max_abs_difference(whole.inputs, data.batch(0, 6).inputs), 1);
  options.seed = 1;
  EXPECT_GT(
      max_abs_difference(whole.inputs,
                         Dataset::open(options, config).batch(1, 6).inputs),
      1);
}

TEST(Images, AreStandardNormalWithUniformLabels) {
  Options options = image_options(kBasic);
  options.dtype = DType::kF64;
  const Batch batch =
      Dataset::open(options, ModelConfig::read(kBasic)).batch(0, 400);
  EXPECT_EQ(batch.inputs.dtype(), DType::kF64);
  double sum = 0, squares = 0;
  for (const double v : batch.inputs.to_vector<double>()) {
    sum += v, squares += v * v;
  }
  const auto count = static_cast<double>(batch.inputs.numel());
  // Five standard errors
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(2 / count));
  std::set<std::int64_t> seen;
  for (const std::int64_t label : batch.targets.to_vector<std::int64_t>()) {
    EXPECT_GE(label, 0);
    EXPECT_LT(label, 10);
    seen.insert(label);
  }
  EXPECT_EQ(seen.size(), 10u);
}

TEST(Images, AreTheDefaultOfImageModels) {
  const auto parsed = [](std::vector<std::string> arguments) {
    Options options;
    CommandLine line("program", "A program.");
    add_shared_options(line, options);
    std::vector<char*> argv;
    arguments.insert(arguments.begin(), "program");
    for (std::string& each : arguments) argv.push_back(each.data());
    line.parse(static_cast<int>(argv.size()), argv.data());
    return options;
  };
  EXPECT_EQ(parsed({"--model", "resnet18"}).data, "random");
  EXPECT_EQ(parsed({"--model", "resnet18", "--data", "book"}).data, "book");
  EXPECT_EQ(parsed({}).data, "book");
  EXPECT_EQ(parsed({"--model", "resnet50", "--image-size", "128"}).image_size,
            128);
}

}  // namespace
}  // namespace shardbook
