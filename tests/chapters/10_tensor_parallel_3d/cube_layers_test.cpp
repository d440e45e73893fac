// Layers on a cube against layers of one device, and a whole GPT.

#include "chapters/10_tensor_parallel_3d/cube_layers.h"

#include <gtest/gtest.h>
#include <algorithm>

#include <utility>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"
#include "tests/chapters/10_tensor_parallel_3d/cube_support.h"
#include "tests/support/errors.h"

namespace shardbook::cube_test {
namespace {

constexpr std::int64_t kBatch = 8, kSeq = 3, kWidth = 16, kVocabulary = 12;

Tensor ids() { return drawn_ids({kBatch, kSeq}, kVocabulary); }
/// drawn_ids, or uneven_targets.
using Targets = Tensor (*)(const Shape& shape, std::int64_t below);

/// Either layout: a norm may come before or after one linear layer.
Layer norm_case(Layout layout) {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock, layout},
           {{kWidth}, Lies::kColumns, layout},
           {{kWidth}, Lies::kColumns, layout}},
          {{}, Lies::kBlock, layout},
          [](const Tensors& in) { return layer_norm(in[0], in[1], in[2]); },
          [](const Tensors& in, const Cube& cube) {
            return cube::layer_norm(in[0], in[1], in[2], cube);
          }};
}

Layer rms_norm_case(Layout layout) {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock, layout},
           {{kWidth}, Lies::kColumns, layout}},
          {{}, Lies::kBlock, layout},
          [](const Tensors& in) { return rms_norm(in[0], in[1], 0.1); },
          [](const Tensors& in, const Cube& cube) {
            return cube::rms_norm(in[0], in[1], cube, 0.1);
          }};
}

std::vector<std::pair<std::string, Layer>> layer_cases() {
  std::vector<std::pair<std::string, Layer>> cases = {
      {"RMS norm", rms_norm_case(Layout::kStraight)},
      {"swapped RMS norm", rms_norm_case(Layout::kSwapped)},
      {"norm", norm_case(Layout::kStraight)},
      {"swapped norm", norm_case(Layout::kSwapped)}};
  cases.push_back({"embedding",
                   {{{{kVocabulary, kWidth}, Lies::kTableColumns}},
                    {},
                    [](const Tensors& in) { return embedding(in[0], ids()); },
                    [](const Tensors& in, const Cube& cube) {
                      return cube::embedding(in[0], ids(), cube);
                    }}});
  cases.push_back({"vocabulary-parallel embedding",
                   {{{{kVocabulary, kWidth}, Lies::kTable}},
                    {},
                    [](const Tensors& in) { return embedding(in[0], ids()); },
                    [](const Tensors& in, const Cube& cube) {
                      return cube::vocabulary_parallel_embedding(in[0], ids(),
                                                                 cube);
                    }}});
  const auto logits = [](const Tensors& in) {
    return reshape(matmul(summa::as_matrix(in[0]), in[1], false, true),
                   {kBatch, kSeq, kVocabulary});
  };
  cases.push_back(
      {"vocabulary-parallel classifier",
       {{{{kBatch, kSeq, kWidth}}, {{kVocabulary, kWidth}, Lies::kTable}},
        {{}, Lies::kBlock, Layout::kSwapped},
        logits,
        [](const Tensors& in, const Cube& cube) {
          return cube::product(in[0], in[1], cube, true);
        }}});
  cases.push_back({"classifier",
                   {{{{kBatch, kSeq, kWidth}},
                     {{kVocabulary, kWidth}, Lies::kTableColumns},
                     {{kVocabulary}, Lies::kWhole}},
                    {{}, Lies::kRows},
                    [=](const Tensors& in) { return add(logits(in), in[2]); },
                    [](const Tensors& in, const Cube& cube) {
                      return cube::classifier(in[0], in[1], in[2], cube);
                    }}});
  for (const auto& [kind, targets] :
       {std::pair<std::string, Targets>{", uneven", summa_test::uneven_targets},
        {"", drawn_ids}}) {
    const auto own = [targets = targets] {
      return targets({kBatch, kSeq}, kVocabulary);
    };
    Layer layer{{{{kBatch, kSeq, kVocabulary}, Lies::kRows}},
                {{}, Lies::kWhole},
                [=](const Tensors& in) { return cross_entropy(in[0], own()); },
                [=](const Tensors& in, const Cube& cube) {
                  return cube::cross_entropy(in[0], own(), cube);
                }};
    cases.push_back({"loss of whole logits" + kind, layer});
    layer.inputs[0].lies = Lies::kBlock;
    layer.inputs[0].layout = Layout::kSwapped;
    layer.split = [=](const Tensors& in, const Cube& cube) {
      return cube::vocabulary_parallel_cross_entropy(in[0], own(), cube);
    };
    cases.push_back({"vocabulary-parallel loss" + kind, layer});
  }
  return cases;
}

TEST(CubeLayers, EqualOneDevice) {
  for (const auto& [name, layer] : layer_cases()) {
    SCOPED_TRACE(name);
    EXPECT_LT(difference(layer, 1, DType::kF64), 1e-12);
    EXPECT_LT(difference(layer, 2, DType::kF64), 1e-12);
    EXPECT_LT(difference(layer, 2, DType::kF32), 2e-4);
  }
}

class CubeGpt : public testing::TestWithParam<std::pair<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Sides, CubeGpt,
                         testing::Values(std::pair(1, true), std::pair(2, true),
                                         std::pair(2, false),
                                         std::pair(3, true),
                                         std::pair(3, false)));

// Three on a side, too: rules for powers of two alone fail there.
TEST_P(CubeGpt, TrainsAsOnOneDevice) {
  const auto [l, keep] = GetParam();
  for (const Passes& passes : {Passes{}, Passes{2, true}}) {
    const Report report =
        trained_on_cube(textbook::odd_gpt(0.2), l, keep, passes);
    sharded_test::expect_claims(report, "cube");
    if (l == 1) {
      EXPECT_EQ(report.parity.max_abs, 0);
    }
  }
}

TEST(CubeLedger, OfTheLayersBesideTheProducts) {
  on_cube(2, [&](const Cube& cube, ProcessGroup& world) {
    const std::string rows_of_x =
        "all_reduce " + cube.straight.input_weight->name();
    const std::string rows_of_y =
        "all_reduce " + cube.straight.output_weight->name();
    const Tensor x = leaf({kBatch / 4, kSeq, kWidth / 2});
    cube::with_layout(x, Layout::kStraight);
    expect_calls(
        world,
        cube::layer_norm(x, leaf({kWidth / 2}), leaf({kWidth / 2}), cube),
        {"all_reduce k 12"},
        {"all_reduce k 12", rows_of_x + " 8", rows_of_x + " 8"});
    expect_calls(world,
                 cube::vocabulary_parallel_embedding(
                     leaf({kVocabulary / 4, kWidth / 2}), ids(), cube),
                 {"all_gather i 48", "reduce_scatter j 96"},
                 {"all_gather j 96", "reduce_scatter i 48"});
    expect_calls(world, cube::linear(x, leaf({kWidth / 4, 8}), leaf({8}), cube),
                 {"all_gather j 96", "all_gather i 64", "reduce_scatter k 96"},
                 {rows_of_y + " 8", "all_gather k 96", "reduce_scatter j 96",
                  "reduce_scatter i 64"});
    const Tensor logits = leaf({kBatch / 4, kSeq, kVocabulary / 2});
    cube::with_layout(logits, Layout::kSwapped);
    expect_calls(world,
                 cube::vocabulary_parallel_cross_entropy(logits, ids(), cube),
                 {"all_reduce j 6", "all_reduce j 6", "all_reduce j 6",
                  "all_reduce k 2", "all_reduce i 2"},
                 {});
  });
}

// Layers that no GPT of this chapter has, so no bill counts their messages.
TEST(CubeLedger, OfTheEmbeddingTheClassifierAndWholeLogits) {
  on_cube(2, [&](const Cube& cube, ProcessGroup& world) {
    const std::string rows_of_x =
        "all_reduce " + cube.straight.input_weight->name();
    const std::string rows_of_y =
        "all_reduce " + cube.swapped.input_weight->name();
    expect_calls(world, cube::embedding(leaf({kVocabulary, 8}), ids(), cube),
                 {}, {rows_of_x + " 96"});
    const Tensor x = leaf({kBatch / 4, kSeq, kWidth / 2});
    cube::with_layout(x, Layout::kStraight);
    expect_calls(
        world,
        cube::classifier(x, leaf({kVocabulary, 8}), leaf({kVocabulary}), cube),
        {"all_reduce k 72"}, {rows_of_x + " 12", rows_of_x + " 96"});
    expect_calls(
        world,
        cube::cross_entropy(leaf({kBatch / 4, kSeq, kVocabulary}), ids(), cube),
        {"all_reduce j 2", "all_reduce i 2"}, {});
    // In a swapped norm: over j, and its gain over the other rows
    const Tensor inner = leaf({kBatch / 4, kSeq, kWidth / 2});
    cube::with_layout(inner, Layout::kSwapped);
    expect_calls(world, cube::layer_norm(inner, leaf({8}), leaf({8}), cube),
                 {"all_reduce j 12"},
                 {"all_reduce j 12", rows_of_y + " 8", rows_of_y + " 8"});
  });
}

TEST(CubeLayers, RefuseWhatDoesNotDivide) {
  expect_text(error_on_cube([](const Cube& cube) {
                return cube::vocabulary_parallel_embedding(
                    drawn({3, 8}, DType::kF64, 1), drawn_ids({6, 3}, 8), cube);
              }),
              {"does not divide into 4 equal parts; give 8"});
  expect_text(
      error_on_cube([](const Cube& cube) {
        const ModelConfig config{"gpt2", 50, 8, 12, 2, 3};
        return GptAttention("attn", config, {}, cube::layers(cube)).heads;
      }),
      {"attention: 3 heads do not divide over 2 ranks; give 4"});
}

}  // namespace
}  // namespace shardbook::cube_test
