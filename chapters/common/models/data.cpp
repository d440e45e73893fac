#include "chapters/common/models/data.h"

#include <algorithm>

#include "chapters/common/models/model_options.h"
#include "chapters/common/models/models.h"
#include "chapters/common/models/token_files.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook {
namespace {

// More than the default run reads; each rank draws them before it trains.
constexpr std::size_t kRandomTokens = 1 << 17;
constexpr std::int64_t kWalkTokens = 32;

std::vector<std::int32_t> tokens_of_bytes(const std::string& bytes) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(bytes.size());
  for (unsigned char byte : bytes) tokens.push_back(byte);
  return tokens;
}

std::vector<std::int32_t> random_tokens(std::int64_t vocab,
                                        std::uint64_t seed) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(kRandomTokens);
  for (const std::uint64_t bits :
       first_random_bits(seed, /*stream=*/1, kRandomTokens)) {
    tokens.push_back(static_cast<std::int32_t>(
        bits * static_cast<std::uint64_t>(vocab) >> 32));
  }
  return tokens;
}

// Up by one, two or three at random, modulo the number of tokens in use.
std::vector<std::int32_t> walk_tokens(std::int64_t vocab, std::uint64_t seed) {
  const auto size = static_cast<std::uint64_t>(std::min(vocab, kWalkTokens));
  std::vector<std::int32_t> tokens;
  tokens.reserve(kRandomTokens);
  std::uint64_t token = 0;
  for (const std::uint64_t bits :
       first_random_bits(seed, /*stream=*/2, kRandomTokens)) {
    token = (token + 1 + (bits * 3 >> 32)) % size;
    tokens.push_back(static_cast<std::int32_t>(token));
  }
  return tokens;
}

bool is_made_here(const std::string& source) {
  return source == "book" || source == "random" || source == "walk";
}

/// Hides what happens inside the scope from observers.
class Unobserved {
 public:
  Unobserved() : observers_(context_.observers()) {
    for (const auto& each : observers_) context_.remove_observer(each);
  }
  ~Unobserved() {
    for (const auto& each : observers_) context_.add_observer(each);
  }
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;

 private:
  RankContext& context_ = RankContext::current();
  const std::vector<std::shared_ptr<Observer>> observers_;
};

}  // namespace

std::string utf8_problem(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80           ? 1
                               : (lead >> 5) == 0x06 ? 2
                               : (lead >> 4) == 0x0e ? 3
                               : (lead >> 3) == 0x1e ? 4
                                                     : 0;
    bool valid = length > 0 && i + length <= text.size();
    std::uint32_t code = length == 1 ? lead : lead & (0x7fu >> length);
    for (std::size_t j = 1; valid && j < length; ++j) {
      const auto next = static_cast<unsigned char>(text[i + j]);
      valid = (next >> 6) == 0x02;
      code = code << 6 | (next & 0x3fu);
    }
    // Overlong forms, surrogates and numbers beyond Unicode are not text.
    const std::uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    valid = valid && code >= smallest[length] && code <= 0x10ffff &&
            (code < 0xd800 || code > 0xdfff);
    if (!valid) return "byte " + std::to_string(i) + " is not UTF-8 text";
    i += length;
  }
  return "";
}

Dataset Dataset::open(const std::string& source, std::int64_t seq,
                      std::int64_t vocab, std::uint64_t seed,
                      const std::string& format) {
  SB_CHECK(seq >= 1, "--seq ", seq, ": a sample has at least one token");
  SB_CHECK(!is_made_here(source) || format == "auto", "--data-format ", format,
           ": --data ", source, " is no file; leave the option out");
  Dataset data;
  data.seq_ = seq;
  const bool is_drawn = source == "random" || source == "walk";
  if (is_drawn && RankContext::current().device.is_meta()) {
    // On shapes no value is read: there are as many tokens as asked for.
    data.num_tokens_ = std::max<std::int64_t>(kRandomTokens, seq + 1);
    return data;
  }
  std::vector<std::int32_t> tokens =
      source == "book"     ? tokens_of_bytes(book_text())
      : source == "random" ? random_tokens(vocab, seed)
      : source == "walk"   ? walk_tokens(vocab, seed)
                           : read_tokens(source, format);
  SB_CHECK(static_cast<std::int64_t>(tokens.size()) > seq, "--data ", source,
           ": ", tokens.size(), " tokens are too few for --seq ", seq,
           "; a sample and its targets need ", seq + 1);
  const auto largest = std::max_element(tokens.begin(), tokens.end());
  SB_CHECK(*largest < vocab, "--data ", source, ": token ", *largest,
           " at position ", largest - tokens.begin(),
           " is not in the model's vocabulary of ", vocab);
  data.num_tokens_ = static_cast<std::int64_t>(tokens.size());
  data.tokens_ =
      std::make_shared<const std::vector<std::int32_t>>(std::move(tokens));
  return data;
}

std::string tokens_text(const ModelOptions& options) {
  return is_made_here(options.data)
             ? ""
             : describe_tokens(options.data, options.data_format);
}

Dataset Dataset::open(const ModelOptions& options, const ModelConfig& config) {
  if (!config.is_image()) {
    return open(options.data, options.seq, config.vocab_size, options.seed,
                options.data_format);
  }
  SB_CHECK(options.data == "random", "--data ", options.data, ": ",
           options.model, " reads images; give --data random");
  SB_CHECK(options.data_format == "auto", "--data-format ", options.data_format,
           ": ", options.model, " reads images; leave the option out");
  Dataset data;
  data.image_size_ = options.image_size;
  data.num_labels_ = config.num_labels;
  data.seed_ = options.seed;
  data.dtype_ = options.dtype;
  return data;
}

void Dataset::fill_images(const Tensor& images, std::int64_t first,
                          std::int64_t stride) const {
  const std::int64_t rows = images.size(0);
  if (rows == 0) return;
  ShardView view;
  view.global_shape = images.shape();
  view.global_shape[0] = first + (rows - 1) * stride + 1;
  view.offset = {first, 0, 0, 0};
  view.step = {stride, 1, 1, 1};
  // Data come from outside: observers must see no work of the device. (A GPU
  // draws its random images itself: the host would take longer than the rest of
  // the step.)
  const Unobserved scope;
  fill_normal(images, seed_, stream_of("images"), 0, 1, view);
}

std::vector<std::int64_t> Dataset::labels(std::int64_t first,
                                          std::int64_t stride,
                                          std::int64_t rows) const {
  std::vector<std::int64_t> labels;
  const std::uint64_t stream = stream_of("labels");
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::uint64_t bits = random_bits(
        seed_, stream, static_cast<std::uint64_t>(first + row * stride));
    labels.push_back(static_cast<std::int64_t>(
        bits * static_cast<std::uint64_t>(num_labels_) >> 32));
  }
  return labels;
}

std::uint64_t Dataset::fingerprint() const {
  if (tokens_ == nullptr) return 0;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const std::int32_t token : *tokens_) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 1099511628211u;
  }
  return hash;
}

Batch Dataset::batch(std::int64_t step, std::int64_t global_batch,
                     BatchSlice slice, std::int64_t count) const {
  MemoryScope kind(MemoryKind::kInput);
  Batch batch;
  batch.slice = slice;
  if (image_size_ > 0) {
    batch.inputs =
        Tensor::empty({count, 3, image_size_, image_size_}, {dtype_, Device()});
    if (batch.inputs.is_meta()) {
      batch.targets = Tensor::empty({count}, {DType::kI64, Device()});
      return batch;
    }
    const std::int64_t first = step * global_batch + slice.first;
    fill_images(batch.inputs, first, slice.stride);
    batch.targets =
        Tensor::from_values(labels(first, slice.stride, count), {count});
    return batch;
  }
  const Shape shape = {count, seq_};
  if (RankContext::current().device.is_meta()) {
    batch.inputs = Tensor::empty(shape, {DType::kI64, Device()});
    batch.targets = Tensor::empty(shape, {DType::kI64, Device()});
    return batch;
  }
  // Rows are gathered on the host, and then move to the device as a whole
  std::vector<std::int64_t> input(static_cast<std::size_t>(count * seq_));
  std::vector<std::int64_t> target(input.size());
  std::size_t at = 0;
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t sample =
        (step * global_batch + slice.first + row * slice.stride) %
        num_samples();
    const std::int32_t* token = tokens_->data() + sample * seq_;
    for (std::int64_t i = 0; i < seq_; ++i) {
      input[at] = token[i];
      target[at++] = token[i + 1];
    }
  }
  batch.inputs = Tensor::from_values(input, shape);
  batch.targets = Tensor::from_values(target, shape);
  return batch;
}

}  // namespace shardbook
