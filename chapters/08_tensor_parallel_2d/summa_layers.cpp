#include "chapters/08_tensor_parallel_2d/summa_layers.h"

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/common/sharded/loss.h"
#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::summa {
namespace {

/// Assembles a vector, or a table's columns, from pieces within one COL.
Tensor whole_columns(const Tensor& pieces, const Grid& grid) {
  return gather_columns(replicated(pieces, grid.depth), *grid.col);
}

/// This depth's rows of the batch.
Tensor rows_of_depth(const Tensor& batch, const Grid& grid) {
  const std::int64_t own = batch.size(0) / grid.d();
  return batch.rows_view(grid.k() * own, (grid.k() + 1) * own);
}

void check_batch(const char* layer, std::int64_t rows, const Grid& grid) {
  SB_CHECK(rows % grid.row_parts() == 0, layer, ": a batch of ", rows,
           " does not divide over ", grid.row_parts(), " parts; give ",
           rows / grid.row_parts() * grid.row_parts() + grid.row_parts());
}

}  // namespace

// --- Linear ----------------------------------------------------------------------

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Grid& grid) {
  if (grid.num_ranks() == 1) return shardbook::linear(x, weight, bias);
  const Tensor w = replicated(weight, grid.depth);
  const Tensor b = bias.defined() ? whole_columns(bias, grid) : Tensor();
  Tensors inputs = {x, w};
  if (b.defined()) inputs.push_back(b);
  return autograd::custom_function(
      "linear_2d", inputs,
      [&](const Tensors& in) {
        const Tensor y = multiply_ab(as_matrix(in[0]), in[1], grid,
                                     in.size() == 3 ? in[2] : Tensor());
        return Tensors{reshape(y, with_last(x.shape(), w.size(1)))};
      },
      [=](const Tensors& grads) {
        const Tensor dy = as_matrix(grads[0]);
        Tensors result(b.defined() ? 3 : 2);
        if (x.requires_grad()) {
          result[0] = reshape(multiply_abt(dy, w, grid), x.shape());
        }
        if (w.requires_grad()) {
          const GradientScope kind(w);
          result[1] = multiply_atb(as_matrix(x), dy, grid);
        }
        if (b.defined() && b.requires_grad()) {
          const GradientScope kind(b);
          result[2] = sum(dy, 0);
        }
        return result;
      })[0];
}

Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  const Grid& grid, double eps) {
  const Tensor g = whole_columns(gamma, grid);
  const Tensor b = whole_columns(beta, grid);
  return split_layer_norm(x, g, b, *grid.row, eps);
}

Tensor rms_norm(const Tensor& x, const Tensor& gamma, const Grid& grid,
                double eps) {
  return split_rms_norm(x, whole_columns(gamma, grid), *grid.row, eps);
}

// --- Embedding -------------------------------------------------------------------

Tensor embedding(const Tensor& table, const Tensor& ids, const Grid& grid) {
  check_batch("embedding", ids.size(0), grid);
  return shardbook::embedding(whole_columns(table, grid), own_rows(ids, grid));
}

Tensor vocabulary_parallel_embedding(const Tensor& table, const Tensor& ids,
                                     const Grid& grid) {
  check_batch("embedding", ids.size(0), grid);
  const Tensor rows = replicated(table, grid.depth);
  const Tensor found =
      embedding_part(rows, rows_of_depth(ids, grid), grid.i() * rows.size(0));
  return scatter_rows(found, *grid.col);
}

// --- Logits and loss -------------------------------------------------------------

Tensor classifier(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Grid& grid) {
  const Tensor w = whole_columns(weight, grid);
  const Tensor partial = matmul(as_matrix(x), w, false, true);
  Tensor logits = sum_over(partial, *grid.row);
  if (bias.defined()) logits = add(logits, replicated(bias, grid.batch));
  return reshape(logits, with_last(x.shape(), weight.size(0)));
}

Tensor vocabulary_parallel_classifier(const Tensor& x, const Tensor& weight,
                                      const Grid& grid) {
  const Tensor w = replicated(weight, grid.depth);
  const Tensor logits = grid.q() == 1 ? matmul(as_matrix(x), w, false, true)
                                      : product_abt(as_matrix(x), w, grid);
  return reshape(logits, with_last(x.shape(), weight.size(0)));
}

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const Grid& grid) {
  return mean_loss_over_ranks(logits, own_rows(targets, grid), *grid.batch);
}

Tensor vocabulary_parallel_cross_entropy(const Tensor& logits,
                                         const Tensor& targets,
                                         const Grid& grid,
                                         std::int64_t vocabulary) {
  const std::int64_t own = logits.size(-1), first = grid.j() * own;
  const Tensor rows = own_rows(targets, grid);
  return mean_loss_over_ranks(
      [&](Reduction reduction) {
        return split_cross_entropy(logits, rows, first, *grid.row, vocabulary,
                                   reduction);
      },
      rows, {grid.batch});
}

// --- GPT -------------------------------------------------------------------------

LayerFactory layers(const Grid& grid, std::int64_t vocabulary) {
  PartLayers parts;
  parts.layout = [place = grid.place()](const Parameter& parameter) {
    return layout(parameter, place);
  };
  parts.linear = [grid](const std::string&, const BlockPart&, const Tensor& x,
                        const Tensor& weight, const Tensor& bias) {
    return linear(x, weight, bias, grid);
  };
  parts.norm = [grid](const std::string&, const Tensor& x, const Tensor& gamma,
                      const Tensor& beta, double eps) {
    return beta.defined() ? layer_norm(x, gamma, beta, grid, eps)
                          : rms_norm(x, gamma, grid, eps);
  };
  parts.embedding = [grid](const Tensor& table, const Tensor& ids) {
    return vocabulary_parallel_embedding(table, ids, grid);
  };
  parts.positions = [grid](const Tensor& rows) {
    return whole_columns(rows, grid);
  };
  parts.dropout = [at = grid.block()](const Tensor& x, double p) {
    return block_dropout(x, p, at);
  };
  parts.logits = [grid](const Tensor& x, const Tensor& table) {
    return vocabulary_parallel_classifier(x, table, grid);
  };
  LayerFactory made = factory_of(parts);
  made.head_rank = grid.j();
  made.head_ranks = grid.q();
  made.attention = [at = grid.block()](const Tensor& qkv,
                                       const AttentionOptions& options) {
    return block_attention(qkv, options, at);
  };
  made.loss = [grid, vocabulary](const Tensor& logits, const Tensor& targets) {
    return vocabulary_parallel_cross_entropy(logits, targets, grid, vocabulary);
  };
  return made;
}

Shards layout(const Parameter& parameter, const Place& place) {
  switch (parameter.kind) {
    case Parameter::kTable:
      return matrix_part(place);
    case Parameter::kPositions:
      return vector_part(place, 1);
    case Parameter::kWeight:
      return matrix_part(place, parameter.part.columns);
    case Parameter::kBias:
      return vector_part(place, 0, parameter.part.columns);
    case Parameter::kNorm:
      return vector_part(place);
    default:
      return {};
  }
}

}  // namespace shardbook::summa
