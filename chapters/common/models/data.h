#pragma once

// The models' input: a stream of tokens, cut into samples; or images.
//
//   Dataset data = Dataset::open("book", /*seq=*/64, /*vocab=*/256, seed);
//   Batch all = data.batch(step, /*global_batch=*/24);
//   Batch mine = data.batch(step, 24, {rank, ranks}, /*rows=*/24 / ranks);
//
// Sample i is tokens [i*S, i*S+S), its targets the tokens one further. Step k
// takes samples k*B .. k*B+B-1; numbers beyond the last sample wrap around.
//
// A random walk ("walk") is for quoted runs, whose numbers must not change with
// the book's text: each token is one, two or three above the one before it,
// modulo 32. A model that has learned it has a loss of ln 3 = 1.10.
//
// Images are random, and without end: pixel j of sample i is element i*3*S*S+j
// of a standard normal stream, its label element i of a uniform one.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {

struct ModelConfig;
struct ModelOptions;

struct Batch {
  Tensor inputs;   ///< i64 [n, S]; images in the model's dtype [n, 3, S, S]
  Tensor targets;  ///< i64 [n, S]; labels i64 [n]
  /// Where the rows lie in the global batch of this step.
  BatchSlice slice;
};

class Dataset {
 public:
  /// `source`: "book" (the chapters' pages as bytes), "random" (uniform),
  /// "walk", or a FILE of text or token ids (token_files.h), whose `format` is
  /// that of --data-format. Throws Error for a file that cannot be read, is
  /// shorter than one sample, or has a token >= vocab.
  static Dataset open(const std::string& source, std::int64_t seq,
                      std::int64_t vocab, std::uint64_t seed,
                      const std::string& format = "auto");

  /// The dataset of --data, --data-format, --seq, --image-size and --seed for a
  /// model.
  static Dataset open(const ModelOptions& options, const ModelConfig& config);

  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_samples() const { return (num_tokens() - 1) / seq_; }
  std::int64_t seq() const { return seq_; }
  /// A hash of the tokens; 0 where the samples depend on the seed.
  std::uint64_t fingerprint() const;

  /// Rows first, first + stride, ... (`count` of them) of step `step`'s global
  /// batch of `global_batch` samples, on the current device.
  Batch batch(std::int64_t step, std::int64_t global_batch, BatchSlice slice,
              std::int64_t count) const;
  /// All rows of a step.
  Batch batch(std::int64_t step, std::int64_t global_batch) const {
    return batch(step, global_batch, BatchSlice{0, 1}, global_batch);
  }

 private:
  void fill_images(const Tensor& images, std::int64_t first,
                   std::int64_t stride) const;
  std::vector<std::int64_t> labels(std::int64_t first, std::int64_t stride,
                                   std::int64_t rows) const;

  std::int64_t image_size_ = 0;  ///< 0: tokens
  std::int64_t num_labels_ = 0;
  std::uint64_t seed_ = 0;
  DType dtype_ = DType::kF32;
  std::shared_ptr<const std::vector<std::int32_t>> tokens_;
  std::int64_t num_tokens_ = 0;
  std::int64_t seq_ = 1;
};

/// The text of all chapter pages, in the order of the book.
std::string book_text();

/// "2000 token ids (u16, llm.c)" where --data is a file of token ids, from its
/// header; else empty. Throws Error as Dataset::open.
std::string tokens_text(const ModelOptions& options);

/// Returns what is wrong with the bytes as UTF-8 text and where, or "".
std::string utf8_problem(std::string_view text);

}  // namespace shardbook
