#pragma once

// The layers of a transformer on a cube of ranks.
//
//   Cube cube = cube_on(mesh);
//   Tensor y = linear(x, weight, bias, cube);      // straight in, swapped out
//   Gpt model(config, init, layers(cube));         // a whole GPT
//
// Each layer reads the layout of its activation from the activation. Shapes below
// are for the straight layout: rows (i, j), columns k; for the swapped one, read k
// for j and j for k. [b] stands for B/l^2 samples.
//
// A cube of one rank equals one device, bit for bit. Colossal-AI has these
// functions as modules: Linear3D, LayerNorm3D, Classifier3D.

#include <cstdint>
#include <string>

#include "chapters/08_tensor_parallel_2d/part_layers.h"
#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/common/models/models.h"

namespace shardbook::cube {

/// x [.., K/l], weight [K/l^2, N/l], or [N/l^2, K/l] with `trans_weight` -> X W in
/// the other layout: all_gather of x over INPUT and of the weight over WEIGHT,
/// reduce_scatter of the product over OUTPUT; backward the same three reversed,
/// and both gathers again unless cube.keep_gathered.
Tensor product(const Tensor& x, const Tensor& weight, const Cube& cube,
               bool trans_weight = false);
/// The same plus bias [N/l], whose gradient is summed over OUTPUT x WEIGHT.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Cube& cube);
/// gamma and beta [h/l]: sums over OUTPUT, gradients over INPUT x WEIGHT.
Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  const Cube& cube, double eps = 1e-5);
/// RMSNorm: the same without beta, and one sum in place of two.
Tensor rms_norm(const Tensor& x, const Tensor& gamma, const Cube& cube,
                double eps);
/// Ids [B, S] of the whole batch, table [V, h/l] -> [b, S, h/l], straight. The
/// table's gradient is summed over INPUT x WEIGHT.
Tensor embedding(const Tensor& table, const Tensor& ids, const Cube& cube);
/// Table [V/l^2, h/l], rows (j, i): gathered over WEIGHT; the ids of this i are
/// looked up in vocabulary block j, and reduce_scatter over INPUT.
Tensor vocabulary_parallel_embedding(const Tensor& table, const Tensor& ids,
                                     const Cube& cube);

/// x [b, .., K/l], weight [classes, K/l], bias [classes] or undefined -> logits
/// [b, .., classes], replicated over OUTPUT.
Tensor classifier(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Cube& cube);
/// Mean over the whole batch of logits as `classifier` returns them for a
/// straight x, against targets [B, ..] of the whole batch.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const Cube& cube);
/// The same for logits that product(x, table, trans_weight) returns from a
/// straight x: rows (i, k), classes j. Classes from `vocabulary` on are padding.
Tensor vocabulary_parallel_cross_entropy(const Tensor& logits,
                                         const Tensor& targets,
                                         const Cube& cube,
                                         std::int64_t vocabulary = 0);

/// The layers of a decoder. Products that are cut by rows (both c_proj of GPT-2)
/// read swapped activations, the others straight ones; each throws Error for an
/// activation of the other layout.
/// `vocabulary` is the number of tokens; the table may have more rows.
LayerFactory layers(const Cube& cube, std::int64_t vocabulary = 0);
/// The part of a parameter that a rank holds.
Shards layout(const summa::Parameter& parameter, const Place& place);

}  // namespace shardbook::cube
