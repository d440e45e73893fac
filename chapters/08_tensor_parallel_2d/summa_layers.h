#pragma once

// The layers of a transformer on a square of ranks, and on squares one above the
// other (a grid with depth).
//
//   Grid grid = grid_of(mesh);
//   Tensor y = linear(x, weight, bias, grid);     // blocks in, blocks out
//   Gpt model(config, init, layers(grid));        // a whole GPT in blocks
//
// Activations [B, S, N] lie in blocks: rank (i, j, k) has part k q + i of the
// batch and part j of N. Weights are blocks (i, j), vectors pieces i of pieces j.
// `replicated` adds the gradients of all depths: without it each depth would
// train a model of its own.
//
// A grid of one rank equals one device, bit for bit. Colossal-AI has these
// functions as modules: Linear2D, LayerNorm2D, VocabParallelEmbedding2D.

#include <cstdint>
#include <string>

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "chapters/08_tensor_parallel_2d/part_layers.h"
#include "chapters/common/models/models.h"

namespace shardbook::summa {

/// x [.., K/q], weight [K/q, N/q], bias [N/q^2] or undefined -> [.., N/q].
/// Y = X W (+ bias, gathered over COL), dX = dY W^T, dW = X^T dY.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Grid& grid);
/// gamma and beta [N/q^2]: gathered over COL; sums over ROW.
Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  const Grid& grid, double eps = 1e-5);
/// RMSNorm: the same without beta, and one sum in place of two.
Tensor rms_norm(const Tensor& x, const Tensor& gamma, const Grid& grid,
                double eps);
/// Ids [B, S] of the whole batch, table [V, h/q^2] -> [b, S, h/q]: the table is
/// gathered over COL.
Tensor embedding(const Tensor& table, const Tensor& ids, const Grid& grid);
/// Ids [B, S] of the whole batch, table [V/q, h/q], rows by i -> [b, S, h/q]. Each
/// rank looks up all ids of its depth among its rows; reduce_scatter over COL.
Tensor vocabulary_parallel_embedding(const Tensor& table, const Tensor& ids,
                                     const Grid& grid);

/// x [.., h/q], weight [classes, h/q^2], bias [classes] or undefined ->
/// [.., classes], replicated in ROW: weight gathered over COL, logits summed over
/// ROW.
Tensor classifier(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Grid& grid);
/// x [.., h/q], weight [V/q, h/q], rows by i -> [.., V/q], columns by j: X W^T.
Tensor vocabulary_parallel_classifier(const Tensor& x, const Tensor& weight,
                                      const Grid& grid);

/// Mean over the whole batch; logits [b, .., classes] replicated in ROW, targets
/// [B, ..] of the whole batch.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const Grid& grid);
/// The same for logits [b, .., V/q]. Classes from `vocabulary` on are padding.
Tensor vocabulary_parallel_cross_entropy(const Tensor& logits,
                                         const Tensor& targets,
                                         const Grid& grid,
                                         std::int64_t vocabulary = 0);

/// The layers of a decoder in blocks. `vocabulary` is the number of tokens; the
/// table may have more rows.
LayerFactory layers(const Grid& grid, std::int64_t vocabulary = 0);
/// The part of a parameter that rank (i, j) holds.
Shards layout(const Parameter& parameter, const Place& place);

}  // namespace shardbook::summa
