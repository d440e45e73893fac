#include "chapters/01_data_parallel/bill.h"

#include <algorithm>

#include "chapters/01_data_parallel/data_parallel.h"

namespace shardbook::data_parallel {
namespace {

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors) {
    bytes += static_cast<double>(tensor.bytes());
  }
  return bytes;
}

struct Sizes {
  double h, heads, vocab, layers;
  double element;  // bytes of an element
  double stat;     // bytes of a statistic
  bool is_gpt;
  bool has_dropout;
};

Sizes sizes_of(const Options& options, const ModelConfig& config) {
  Sizes s;
  s.h = static_cast<double>(config.n_embd);
  s.heads = static_cast<double>(config.n_head);
  s.vocab = static_cast<double>(config.vocab_size);
  s.layers = static_cast<double>(config.n_layer);
  s.element = static_cast<double>(dtype_bytes(options.dtype));
  s.stat = options.dtype == DType::kF64 ? 8 : 4;
  s.is_gpt = config.type == "gpt2";
  s.has_dropout = options.dropout > 0;
  return s;
}

// Bytes that a replica's forward keeps per token, as derived in
// chapters/common/run/memory.cpp, without the logits: they leave for the main
// device.
double kept_bytes(const Sizes& s) {
  if (!s.is_gpt) return 11 * s.h * s.element;
  const double block = 16 * s.h * s.element + (4 + s.heads) * s.stat;
  return s.layers * block + 2 * s.h * s.element + 2 * s.stat;
}

// Peak of a device whose replica has `tokens` tokens. The gradient of the
// logits (and, on the main device, of all logits) arrives, and the head adds
// the gradient of its input; later, the widest point inside the layers.
double replica_activations(const Sizes& s, double tokens,
                           double logit_gradients) {
  const double at_head =
      tokens * (kept_bytes(s) + s.h * s.element) + logit_gradients * s.element;
  // Behind the blocks: input and output of the last norm, and its statistics.
  const double behind =
      s.is_gpt ? 2 * s.h * s.element + 2 * s.stat : 11 * s.h * s.element;
  // Dropout behind the last layer has a gradient of its own beside its output's.
  const double widths = !s.is_gpt ? 13 : s.has_dropout ? 6 : 5;
  const double widest = widths * s.h * s.element;
  const double inside = tokens * (kept_bytes(s) - behind + widest);
  return std::max(at_head, inside);
}

// The main device also holds all logits, their softmax's sums and, for the
// loss's backward, all their gradients.
double main_activations(const Sizes& s, double tokens, double all_tokens) {
  // Scalars: the loss and, until the logits have theirs, its gradient.
  const double at_loss = tokens * kept_bytes(s) +
                         all_tokens * (2 * s.vocab * s.element + s.stat) +
                         2 * s.stat;
  const double in_replica =
      replica_activations(s, tokens, all_tokens * s.vocab) + s.stat;
  return std::max(at_loss, in_replica);
}

// Buffers that parameters and gradients travel in. The main device packs what
// it sends and has room for what arrives; the others pack gradients. A chunk of
// one tensor needs no packing.
double communication_bytes(const Tensors& parameters, bool is_main) {
  std::int64_t largest = 0;
  for (const auto& chunk : coalesce(parameters)) {
    if (chunk.size() == 1 && !is_main) continue;
    std::int64_t bytes = 0;
    for (std::size_t i : chunk) bytes += parameters[i].bytes();
    largest = std::max(largest, bytes);
  }
  return static_cast<double>(largest);
}

}  // namespace

std::vector<Traffic> step_traffic(std::int64_t batch, int num_devices,
                                  double row_bytes_in, double row_bytes_out,
                                  double parameter_bytes, double buffer_bytes) {
  std::vector<Traffic> traffic(static_cast<std::size_t>(num_devices));
  const auto chunks = ceil_chunks(batch, num_devices);
  const double others = static_cast<double>(chunks.size() - 1);
  for (std::size_t i = 1; i < chunks.size(); ++i) {
    const double rows = static_cast<double>(chunks[i].second - chunks[i].first);
    traffic[0].scatter_inputs += rows * row_bytes_in;
    traffic[0].scatter_gradients += rows * row_bytes_out;
    traffic[i].gather_outputs = rows * row_bytes_out;
    traffic[i].reduce_gradients = parameter_bytes;
  }
  traffic[0].replicate = others * (parameter_bytes + buffer_bytes);
  return traffic;
}

std::vector<Traffic> step_traffic(const Options& options,
                                  const ModelConfig& config) {
  const Sizes s = sizes_of(options, config);
  const auto seq = static_cast<double>(options.seq);
  const double parameters =
      single_device_bill(options, config, 1)[MemoryKind::kParameter];
  return step_traffic(options.batch, options.world_size, seq * 8,
                      seq * s.vocab * s.element, parameters, 0);
}

std::vector<MemoryBill> memory_bills(const Options& options,
                                     const ModelConfig& config, Module& model) {
  const auto n = static_cast<std::size_t>(options.world_size);
  MemoryBill nothing;
  for (int k = 0; k < kNumMemoryKinds; ++k) {
    const auto kind = static_cast<MemoryKind>(k);
    if (kind != MemoryKind::kWorkspace) nothing[kind] = 0;
  }
  std::vector<MemoryBill> bills(n, nothing);
  bills[0] = single_device_bill(options, config, options.batch);
  if (options.steps == 0) return bills;

  const Sizes s = sizes_of(options, config);
  const auto seq = static_cast<double>(options.seq);
  const double all_tokens = static_cast<double>(options.batch) * seq;
  const auto chunks = ceil_chunks(options.batch, options.world_size);
  if (chunks.size() == 1) {
    if (!config.is_image()) {
      bills[0][MemoryKind::kActivation] =
          main_activations(s, all_tokens, all_tokens);
    }
    return bills;
  }
  const Tensors parameters = model.parameters();
  const double parameter_bytes = bytes_of(parameters);

  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const double tokens =
        static_cast<double>(chunks[i].second - chunks[i].first) * seq;
    MemoryBill& bill = bills[i];
    bill[MemoryKind::kParameter] = parameter_bytes;
    bill[MemoryKind::kCommunication] =
        communication_bytes(parameters, /*is_main=*/i == 0);
    if (i == 0) {
      // The gradients of replica 0, and beside them their sum over devices.
      bill[MemoryKind::kGradient] = 2 * parameter_bytes;
      bill[MemoryKind::kActivation] = main_activations(s, tokens, all_tokens);
      continue;
    }
    // The tied table receives one gradient from the head and one from the
    // embedding; both exist until they are added.
    bill[MemoryKind::kGradient] =
        parameter_bytes + (s.is_gpt ? s.vocab * s.h * s.element : 0);
    bill[MemoryKind::kActivation] =
        replica_activations(s, tokens, tokens * s.vocab);
    bill[MemoryKind::kInput] = tokens * 8;
  }
  return bills;
}

}  // namespace shardbook::data_parallel
