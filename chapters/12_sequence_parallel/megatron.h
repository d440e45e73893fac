#pragma once

// Megatron's sequence parallelism: inside a tensor-parallel group, the tokens
// are cut where the matrices are not.
//
//   LayerNorm, dropout,      c_attn, attention, c_proj      dropout, add, ...
//   residual on s/t tokens   on all tokens, 1/t of the heads  on s/t tokens
//        --- all_gather --->                --- reduce_scatter --->
//
// An all-reduce is a reduce-scatter and an all-gather; tensor parallelism does
// both at one place and lets every rank normalise all tokens. Here LayerNorm
// lies between the two, and a rank has 1/t of every activation.
//
// Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
// Transformer Models", sections 4 and 5.

#include <string>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/common/models/models.h"
#include "comm/process_group.h"

namespace shardbook::sequence_parallel {

/// y_r = all_gather(x) W_r + b_r: columns for all tokens from own tokens; b_r may
/// be undefined.
///
///   x        [n, s/t, in]    this rank's tokens
///   weight   [in, out/t]
///   returns  [n, s, out/t]
///
/// Keeps only x, and gathers it once more for the gradient of the weight.
/// Communication, in n s in elements: an all_gather forward; backward an
/// all_gather of x, which overlaps the product for the gradient of x, and a
/// reduce_scatter of that gradient. Without requires_grad, a weight causes no
/// gather in backward, and x no scatter.
Tensor gathered_linear(const Tensor& x, const Tensor& weight,
                       const Tensor& bias, ProcessGroup& tp);

struct MegatronOptions {
  /// Compute scores, softmax and weighted values again in backward.
  bool recompute_attention = false;
};

/// The layers of one rank; tensor parallelism's in a group of one.
LayerFactory megatron_layers(const ModelConfig& config, ProcessGroup& tp,
                             const MegatronOptions& setup = {});

/// True for parameters that are used on cut tokens: norms, biases after a
/// reduce_scatter, positions. Their gradients are parts of sums over the group, as
/// those of a Llama's norms of heads, which see all tokens of some heads, are
/// (tensor_parallel::PartialGradients).
bool has_partial_gradient(const std::string& name);

}  // namespace shardbook::sequence_parallel
