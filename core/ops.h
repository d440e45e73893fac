#pragma once

// Operations: each computes a result and records its own backward.
//
// Operands are on one device and of one floating dtype unless said otherwise.
// Every operation also runs on meta devices, where it computes shapes, and
// tells the observers its flops and bytes. `[.., n]` stands for any leading
// dims. Shapes that do not fit throw Error.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace shardbook {

// --- Element-wise, with NumPy's broadcasting ---------------------------------

Tensor add(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);
/// factor * x.
Tensor scale(const Tensor& x, double factor);
Tensor add_scalar(const Tensor& x, double value);
Tensor neg(const Tensor& x);
Tensor abs(const Tensor& x);
Tensor relu(const Tensor& x);
enum class GeluForm {
  kTanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's
  kErf,   ///< 0.5 x (1 + erf(x / sqrt(2))): exact, torch.nn.GELU's default
};
Tensor gelu(const Tensor& x, GeluForm form = GeluForm::kTanh);
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor square(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);

/// Converts; the gradient comes back in x's dtype.
Tensor to_dtype(const Tensor& x, DType dtype);
/// Copies to another device; the gradient is copied back.
Tensor to_device(const Tensor& x, const Device& device);

// --- Reductions ----------------------------------------------------------------

/// All elements -> [].
Tensor sum(const Tensor& x);
Tensor mean(const Tensor& x);
/// Over one dim, which disappears.
Tensor sum(const Tensor& x, std::int64_t dim);
Tensor mean(const Tensor& x, std::int64_t dim);

// --- Layout --------------------------------------------------------------------

/// A view; one size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape);
/// Rows begin..end-1 of dim 0: a view. Along other dims: a copy.
Tensor slice(const Tensor& x, std::int64_t dim, std::int64_t begin,
             std::int64_t end);
/// End to end along `dim`; other dims agree.
Tensor concat(const Tensors& parts, std::int64_t dim);
/// Exchanges two dims (a copy).
Tensor transpose(const Tensor& x, std::int64_t dim0, std::int64_t dim1);
Tensor permute(const Tensor& x, const std::vector<std::int64_t>& order);

// --- Products ------------------------------------------------------------------

/// a [m, k] or [b, m, k], b [k, n] or [b, k, n]; the flags read an operand as
/// transposed in its last two dims. 2 b m n k flops.
Tensor matmul(const Tensor& a, const Tensor& b, bool trans_a = false,
              bool trans_b = false);
/// Called in backward with the gradient of an input as soon as it exists; the
/// function it returns is called when the weight's gradient exists too.
/// Meanwhile the gradient may be summed over ranks, in place.
using InputGradientHook =
    std::function<std::function<void()>(const Tensor& gradient)>;
/// x [.., k], weight [k, n], bias [n] or undefined -> [.., n].
Tensor linear(const Tensor& x, const Tensor& weight,
              const Tensor& bias = Tensor(),
              const InputGradientHook& hook = {});
/// linear(gelu(linear(x, w1, b1), form), w2, b2); both biases may be undefined.
/// On CUDA, the products of 16-bit elements (f32: with allow_tf32) apply the
/// tanh form and its derivative, and sum b1's gradient, before they store their
/// results. Otherwise it is that composition, bit for bit.
Tensor gelu_mlp(const Tensor& x, const Tensor& w1, const Tensor& b1,
                const Tensor& w2, const Tensor& b2,
                GeluForm form = GeluForm::kTanh);

// --- Images: [n, height, width, channels] ------------------------------------

/// Slides `weight` over images with zeros around them:
///
///   x        [n, h, w, in]
///   weight   [out, in, kh, kw], as PyTorch keeps it
///   bias     [out] or undefined
///   returns  [n, oh, ow, out], oh = floor((h + 2 padding - kh) / stride) + 1
///
/// A product of [n oh ow, in kh kw] and [in kh kw, out]: 2 n oh ow out in kh kw
/// flops. f64, f16 and deterministic mode compute that product image by image:
/// an image's result does not depend on the others.
Tensor conv2d(const Tensor& x, const Tensor& weight,
              const Tensor& bias = Tensor(), std::int64_t stride = 1,
              std::int64_t padding = 0);
/// The largest of each size x size window, which begins `padding` before the
/// image: [n, h, w, c] -> [n, oh, ow, c]. The gradient goes to the first of
/// equals. 2 padding <= size.
Tensor max_pool2d(const Tensor& x, std::int64_t size, std::int64_t stride,
                  std::int64_t padding = 0);
/// Mean over height and width: [n, h, w, c] -> [n, c].
Tensor global_avg_pool2d(const Tensor& x);

// --- Layers --------------------------------------------------------------------

/// Which elements of a global tensor a tensor holds: element (i, j, ..) is
/// global element (offset[0] + step[0] i, offset[1] + step[1] j, ..). Empty
/// offsets are zeros, empty steps ones; an empty shape: all of the tensor.
/// Random numbers are drawn for global elements. See kernels/random.h.
struct ShardView {
  Shape global_shape;
  std::vector<std::int64_t> offset;
  std::vector<std::int64_t> step;
};

/// Rows of table [v, h] by indices (i64 or i32) [..] -> [.., h].
Tensor embedding(const Tensor& table, const Tensor& indices);
/// The same for a table that holds rows first_row, first_row + 1, .. of a
/// larger one: other indices read zeros, and their gradients are dropped.
Tensor embedding_part(const Tensor& table, const Tensor& indices,
                      std::int64_t first_row);
/// Normalises the last dim n; gamma and beta [n].
Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  double eps = 1e-5);
/// weight * (x / sqrt(mean of x^2 + eps)) over the last dim n; weight [n], eps
/// 1e-5 or 1e-6. The quotient is computed in f32 (f64 for f64) and rounded to
/// x's dtype before weight multiplies it, as in Llama. Keeps x and one number
/// per row. Zhang and Sennrich 2019.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
/// silu(gate) * up of [.., 2f] = [gate | up] -> [.., f]; silu(x) = x sigmoid(x).
/// Rounds silu(gate) to the dtype before the product, as transformers does.
/// Keeps its input. Shazeer 2020.
Tensor swiglu(const Tensor& gate_up);
Tensor softmax(const Tensor& x);
Tensor log_softmax(const Tensor& x);

struct AttentionOptions {
  std::int64_t heads = 1;
  /// Key and value heads, each shared by heads / kv_heads consecutive query
  /// heads (grouped queries); 0 means heads.
  std::int64_t kv_heads = 0;
  /// Columns of a head of values; 0: as many as of queries. Others: [q | k | v]
  /// in one tensor, not on CUDA.
  std::int64_t value_dim = 0;
  bool causal = true;
  double dropout = 0.0;
  /// Softmax of scale * q k; 0 means 1 / sqrt(head size).
  double scale = 0.0;
  /// For dropout: which part of one device's [b, heads, sq, sk] this is.
  ShardView shard;
};
/// qkv [b, s, (heads + 2 kv_heads) d], [q | k | v], each by heads -> [b, s, heads
/// d]; without kv_heads that is [b, s, 3h] -> [b, s, h], and with value_dim w [b, s,
/// (heads + kv_heads) d + kv_heads w] -> [b, s, heads w]. Keeps no [s, s] matrix:
/// the backward computes the probabilities again. Shared keys are not repeated in
/// memory. Dropout draws as `dropout` does, at the global positions of
/// options.shard.
Tensor attention(const Tensor& qkv, const AttentionOptions& options);
/// The same with q [b, sq, heads d], k and v [b, sk, kv_heads d].
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options);

/// Zeroes elements with probability p and scales the others by 1 / (1 - p). The
/// mask depends on seed, step, number of the operation and GLOBAL position:
/// `shard` says which part of one device's tensor `x` is, and dim 0 of that
/// tensor is the batch (RandomState::batch). p = 0 is the identity.
Tensor dropout(const Tensor& x, double p, const ShardView& shard = {});

// --- Losses: scalars [] -----------------------------------------------------------

enum class Reduction { kMean, kSum };
/// logits [.., v], targets i64 [..]; targets of -100 count for nothing.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     Reduction reduction = Reduction::kMean);
/// Reduces a tensor [rows] in place over the ranks that share a vocabulary: the
/// largest where `is_max`, else the sum.
using ReduceOverRanks = std::function<void(const Tensor& x, bool is_max)>;
/// cross_entropy over a vocabulary on several ranks: this rank's logits [.., n]
/// are classes first, first + 1, ..; classes from `num_classes` on are padding.
/// Every rank has all targets and gets the loss. Three reductions of [rows] in
/// forward: largest logit, logit of the target, sum of exponentials; none in
/// backward. Narayanan et al. 2021; Shoeybi et al. 2019, section 3.
Tensor cross_entropy_part(const Tensor& logits, const Tensor& targets,
                          std::int64_t first, std::int64_t num_classes,
                          const ReduceOverRanks& reduce,
                          Reduction reduction = Reduction::kMean);
/// Mean of (x - target)^2.
Tensor mse_loss(const Tensor& x, const Tensor& target);

// --- Batch normalisation, in the pieces that a synchronised one needs --------------

/// Turns the ranks' sums into global sums, in place: [n] f64. Identity on one
/// device.
using SumOverRanks = std::function<void(const Tensor& sums)>;

struct BatchNormResult {
  Tensor y;          ///< like x
  Tensor mean;       ///< f64 [c], over all ranks
  Tensor variance;   ///< f64 [c], biased
  double count = 0;  ///< values per channel, over all ranks
};
struct BatchNormOptions {
  double eps = 1e-5;
  SumOverRanks sum_over_ranks = {};
  /// Computed in the same pass: y = relu(normalised + addend).
  bool relu = false;
  Tensor addend = {};  ///< like x, or undefined
};
/// x [.., c], gamma and beta [c]; statistics over the other dims, and over ranks
/// where `sum_over_ranks` is given: two calls forward (of c + 1 and c values),
/// one backward (of 2c).
BatchNormResult batch_norm_train(const Tensor& x, const Tensor& gamma,
                                 const Tensor& beta,
                                 const BatchNormOptions& options);
/// With given statistics [c].
Tensor batch_norm_eval(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                       const Tensor& mean, const Tensor& variance, double eps);

// --- Filling; not recorded -----------------------------------------------------------

/// A stream number from a name, such as a parameter's.
std::uint64_t stream_of(const std::string& name);
/// The 32 random bits of one element of a stream, from which the fills below
/// make their numbers.
std::uint32_t random_bits(std::uint64_t seed, std::uint64_t stream,
                          std::uint64_t element);
/// Those of elements 0 to count - 1, four at a time.
std::vector<std::uint32_t> first_random_bits(std::uint64_t seed,
                                             std::uint64_t stream,
                                             std::size_t count);
/// Draws depend on (seed, stream, global element) alone.
void fill_normal(const Tensor& x, std::uint64_t seed, std::uint64_t stream,
                 double mean, double stddev, const ShardView& view = {});
void fill_uniform(const Tensor& x, std::uint64_t seed, std::uint64_t stream,
                  double low, double high, const ShardView& view = {});

/// Sum of squares in f64; 0 on meta.
double sum_of_squares(const Tensor& x);

}  // namespace shardbook
