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
// What ranks of one depth sum up over their rows, `replicated` adds over the
// depth: without it each depth would train a model of its own.
//
// A grid of one rank computes what one device does, bit for bit.

#include <cstdint>
#include <string>

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "chapters/common/models/models.h"

namespace shardbook::summa {

/// x [.., K/q], weight [K/q, N/q], bias [N/q^2] or undefined -> [.., N/q].
/// Y = X W (+ bias, gathered over COL), dX = dY W^T, dW = X^T dY.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Grid& grid);
/// gamma and beta [N/q^2]: gathered over COL; sums over ROW.
Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  const Grid& grid, double eps = 1e-5);
/// qkv [b, S, 3h/q], this rank's heads of queries, keys and values -> [b, S, h/q].
/// `options` are those of one device. Nothing is sent.
Tensor attention(const Tensor& qkv, const AttentionOptions& options,
                 const Grid& grid);
/// Draws the block's part of the mask of one device.
Tensor dropout(const Tensor& x, double p, const Grid& grid);

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

class Linear2D : public ModuleOf<Linear2D> {
 public:
  /// Draws the blocks that one device's Linear has there. `blocks`: see
  /// matrix_part.
  Linear2D(const std::string& name, std::int64_t in, std::int64_t out,
           double stddev, InitOptions init, const Grid& grid,
           std::int64_t blocks = 1);
  Tensor forward(const Tensor& x) override {
    return linear(x, weight, bias, grid_);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Linear2D"; }

  Tensor weight;  ///< [in/q, out/q]
  Tensor bias;    ///< [out/q^2]

 private:
  Grid grid_;
};

class LayerNorm2D : public ModuleOf<LayerNorm2D> {
 public:
  LayerNorm2D(std::int64_t width, double eps, InitOptions init,
              const Grid& grid);
  Tensor forward(const Tensor& x) override {
    return layer_norm(x, weight, bias, grid_, eps);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "LayerNorm2D"; }

  Tensor weight, bias;  ///< [width/q^2]
  double eps;

 private:
  Grid grid_;
};

class Embedding2D : public ModuleOf<Embedding2D> {
 public:
  Embedding2D(const std::string& name, std::int64_t rows, std::int64_t width,
              double stddev, InitOptions init, const Grid& grid);
  Tensor forward(const Tensor& ids) override {
    return embedding(weight, ids, grid_);
  }
  /// The first rows, this rank's columns: [rows, width/q].
  Tensor first_rows(std::int64_t rows) const;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Embedding2D"; }

  Tensor weight;  ///< [rows, width/q^2]

 private:
  Grid grid_;
};

class VocabParallelEmbedding2D : public ModuleOf<VocabParallelEmbedding2D> {
 public:
  VocabParallelEmbedding2D(const std::string& name, std::int64_t rows,
                           std::int64_t width, double stddev, InitOptions init,
                           const Grid& grid);
  Tensor forward(const Tensor& ids) override {
    return vocabulary_parallel_embedding(weight, ids, grid_);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "VocabParallelEmbedding2D"; }

  Tensor weight;  ///< [rows/q, width/q]

 private:
  Grid grid_;
};

class Dropout2D : public ModuleOf<Dropout2D> {
 public:
  Dropout2D(double p, const Grid& grid) : p_(p), grid_(grid) {}
  Tensor forward(const Tensor& x) override {
    return is_training() ? dropout(x, p_, grid_) : x;
  }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "Dropout2D"; }

 private:
  double p_;
  Grid grid_;
};

/// The layers of a GPT in blocks. `vocabulary` is the number of tokens, where the
/// table has more rows than that.
LayerFactory layers(const Grid& grid, std::int64_t vocabulary = 0);
/// The part of a GPT's parameter that rank (i, j) holds, by its name.
Shards layout(const std::string& name, const Place& place);

}  // namespace shardbook::summa
