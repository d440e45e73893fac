#pragma once

// Every layer in blocks, against the same layer on one device.

#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"

namespace shardbook::summa_test {

// Divisible by 4 and by 9, as pieces of pieces need, and the batch by 2 x 2 and
// by 3.
constexpr std::int64_t kBatch = 12, kSeq = 5, kWidth = 36, kVocabulary = 18;

/// This rank's heads of queries, keys and values, cut by columns.
inline Tensor own_heads_of(const Tensor& qkv, const Grid& grid) {
  return take_part(summa::own_rows(qkv, grid), {{2, grid.j(), grid.q(), 3}});
}

inline Layer linear_case() {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock},
           {{kWidth, 72}, Lies::kMatrix},
           {{72}, Lies::kVector}},
          Lies::kBlock,
          [](const Tensors& in) { return linear(in[0], in[1], in[2]); },
          [](const Tensors& in, const Grid& grid) {
            return summa::linear(in[0], in[1], in[2], grid);
          }};
}

inline Layer norm_case() {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock},
           {{kWidth}, Lies::kVector},
           {{kWidth}, Lies::kVector}},
          Lies::kBlock,
          [](const Tensors& in) { return layer_norm(in[0], in[1], in[2]); },
          [](const Tensors& in, const Grid& grid) {
            return summa::layer_norm(in[0], in[1], in[2], grid);
          }};
}

inline Layer rms_norm_case() {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock}, {{kWidth}, Lies::kVector}},
          Lies::kBlock,
          [](const Tensors& in) { return rms_norm(in[0], in[1], 0.1); },
          [](const Tensors& in, const Grid& grid) {
            return summa::rms_norm(in[0], in[1], grid, 0.1);
          }};
}

inline Layer classifier_case() {
  return {{{{kBatch, kSeq, kWidth}, Lies::kBlock},
           {{kVocabulary, kWidth}, Lies::kTable},
           {{kVocabulary}, Lies::kWhole}},
          Lies::kRows,
          [](const Tensors& in) {
            return reshape(
                add(matmul(summa::as_matrix(in[0]), in[1], false, true), in[2]),
                {kBatch, kSeq, kVocabulary});
          },
          [](const Tensors& in, const Grid& grid) {
            return summa::classifier(in[0], in[1], in[2], grid);
          }};
}

/// drawn_ids, or uneven_targets.
using Targets = Tensor (*)(const Shape& shape, std::int64_t below);

inline Layer vocabulary_loss_case(Targets targets = drawn_ids) {
  return {{{{kBatch, kSeq, kVocabulary}, Lies::kBlock}},
          Lies::kWhole,
          [=](const Tensors& in) {
            return cross_entropy(in[0], targets({kBatch, kSeq}, kVocabulary));
          },
          [=](const Tensors& in, const Grid& grid) {
            return summa::vocabulary_parallel_cross_entropy(
                in[0], targets({kBatch, kSeq}, kVocabulary), grid);
          }};
}

inline Layer whole_loss_case(Targets targets) {
  Layer layer = vocabulary_loss_case(targets);
  layer.inputs[0].lies = Lies::kRows;
  layer.split = [=](const Tensors& in, const Grid& grid) {
    return summa::cross_entropy(in[0], targets({kBatch, kSeq}, kVocabulary),
                                grid);
  };
  return layer;
}

inline std::vector<std::pair<std::string, Layer>> layer_cases() {
  const auto ids = [] { return drawn_ids({kBatch, kSeq}, kVocabulary); };
  std::vector<std::pair<std::string, Layer>> cases = {
      {"linear", linear_case()},
      {"layer norm", norm_case()},
      {"RMS norm", rms_norm_case()},
      {"classifier", classifier_case()},
      {"vocabulary-parallel loss", vocabulary_loss_case()},
      {"vocabulary-parallel loss of uneven targets",
       vocabulary_loss_case(uneven_targets)},
      {"loss of whole logits", whole_loss_case(drawn_ids)},
      {"loss of whole logits, uneven targets",
       whole_loss_case(uneven_targets)}};
  cases.push_back({"embedding",
                   {{{{kVocabulary, kWidth}, Lies::kTable}},
                    Lies::kBlock,
                    [=](const Tensors& in) { return embedding(in[0], ids()); },
                    [=](const Tensors& in, const Grid& grid) {
                      return summa::embedding(in[0], ids(), grid);
                    }}});
  cases.push_back({"vocabulary-parallel embedding",
                   {{{{kVocabulary, kWidth}, Lies::kMatrix}},
                    Lies::kBlock,
                    [=](const Tensors& in) { return embedding(in[0], ids()); },
                    [=](const Tensors& in, const Grid& grid) {
                      return summa::vocabulary_parallel_embedding(in[0], ids(),
                                                                  grid);
                    }}});
  cases.push_back(
      {"vocabulary-parallel classifier",
       {{{{kBatch, kSeq, kWidth}, Lies::kBlock},
         {{kVocabulary, kWidth}, Lies::kMatrix}},
        Lies::kBlock,
        [](const Tensors& in) {
          return reshape(matmul(summa::as_matrix(in[0]), in[1], false, true),
                         {kBatch, kSeq, kVocabulary});
        },
        [](const Tensors& in, const Grid& grid) {
          return summa::vocabulary_parallel_classifier(in[0], in[1], grid);
        }}});
  return cases;
}

}  // namespace shardbook::summa_test
