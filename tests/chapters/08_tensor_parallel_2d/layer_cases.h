#pragma once

// Every layer in blocks beside that of one device.

#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"

namespace shardbook::summa_test {

// They divide by 4 and by 9, as pieces of pieces need, and the batch by 2 x 2 and
// by 3.
constexpr std::int64_t kBatch = 12, kSeq = 5, kWidth = 36, kVocabulary = 18;

/// Heads of queries, keys and values by columns: this rank's heads of each.
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

inline Layer vocabulary_loss_case() {
  return {{{{kBatch, kSeq, kVocabulary}, Lies::kBlock}},
          Lies::kWhole,
          [](const Tensors& in) {
            return cross_entropy(in[0], drawn_ids({kBatch, kSeq}, kVocabulary));
          },
          [](const Tensors& in, const Grid& grid) {
            return summa::vocabulary_parallel_cross_entropy(
                in[0], drawn_ids({kBatch, kSeq}, kVocabulary), grid);
          }};
}

inline std::vector<std::pair<std::string, Layer>> layer_cases() {
  const auto ids = [] { return drawn_ids({kBatch, kSeq}, kVocabulary); };
  std::vector<std::pair<std::string, Layer>> cases = {
      {"linear", linear_case()},
      {"layer norm", norm_case()},
      {"classifier", classifier_case()},
      {"vocabulary-parallel loss", vocabulary_loss_case()}};
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
  cases.push_back(
      {"loss of whole logits",
       {{{{kBatch, kSeq, kVocabulary}, Lies::kRows}},
        Lies::kWhole,
        [=](const Tensors& in) { return cross_entropy(in[0], ids()); },
        [=](const Tensors& in, const Grid& grid) {
          return summa::cross_entropy(in[0], ids(), grid);
        }}});
  const auto uneven = [] {
    return uneven_targets({kBatch, kSeq}, kVocabulary);
  };
  const auto uneven_mean = [=](const Tensors& in) {
    return cross_entropy(in[0], uneven());
  };
  cases.push_back({"vocabulary-parallel loss of uneven targets",
                   {{{{kBatch, kSeq, kVocabulary}, Lies::kBlock}},
                    Lies::kWhole,
                    uneven_mean,
                    [=](const Tensors& in, const Grid& grid) {
                      return summa::vocabulary_parallel_cross_entropy(
                          in[0], uneven(), grid);
                    }}});
  cases.push_back({"loss of whole logits, uneven targets",
                   {{{{kBatch, kSeq, kVocabulary}, Lies::kRows}},
                    Lies::kWhole,
                    uneven_mean,
                    [=](const Tensors& in, const Grid& grid) {
                      return summa::cross_entropy(in[0], uneven(), grid);
                    }}});
  return cases;
}

}  // namespace shardbook::summa_test
