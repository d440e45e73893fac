#include "chapters/10_tensor_parallel_3d/cube_layers.h"

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/common/sharded/loss.h"
#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::cube {

using summa::as_matrix;
using summa::gather_rows;
using summa::GradientScope;
using summa::InFlight;
using summa::replicated;
using summa::scatter_rows;
using summa::split_cross_entropy;
using summa::split_layer_norm;
using summa::split_rms_norm;
using summa::sum_over;
using summa::with_last;

// --- Linear ----------------------------------------------------------------------

Tensor product(const Tensor& x, const Tensor& weight, const Cube& cube,
               bool trans_weight) {
  const Layout layout = layout_of(x);
  const Roles& roles = cube.roles(layout);
  if (cube.num_ranks() == 1) {
    const Tensor y = matmul(as_matrix(x), weight, false, trans_weight);
    return with_layout(
        reshape(y, with_last(x.shape(), weight.size(trans_weight ? 0 : 1))),
        swapped(layout));
  }
  Tensor y, kept_x, kept_weight;
  {
    const NoGrad no_grad;
    // Both operands arrive at the same time, over two axes
    InFlight x_arrives = InFlight::gather(x, *roles.input);
    InFlight weight_arrives = InFlight::gather(weight, *roles.weight);
    const Tensor all_x = as_matrix(x_arrives.wait());
    const Tensor all_weight = weight_arrives.wait();
    // The sums over the third axis leave rows (i, k)
    const Tensor partial = matmul(all_x, all_weight, false, trans_weight);
    y = InFlight::scatter(partial, *roles.output).wait();
    y = reshape(y, with_last(x.shape(), y.size(1))).detach();
    if (cube.keep_gathered) kept_x = all_x, kept_weight = all_weight;
  }
  autograd::record("product_3d", {x, weight}, {y}, [=](const Tensors& grads) {
    const bool needs_x = x.requires_grad();
    const bool needs_weight = weight.requires_grad();
    // All three arrive at the same time, over three axes
    InFlight dy_arrives = InFlight::gather(as_matrix(grads[0]), *roles.output);
    InFlight weight_arrives, x_arrives;
    if (needs_x && !kept_weight.defined()) {
      weight_arrives = InFlight::gather(weight, *roles.weight);
    }
    if (needs_weight && !kept_x.defined()) {
      x_arrives = InFlight::gather(x, *roles.input);
    }
    const Tensor dy = dy_arrives.wait();
    Tensors result(2);
    InFlight dx_leaves;
    if (needs_x) {
      const Tensor all_weight =
          kept_weight.defined() ? kept_weight : weight_arrives.wait();
      dx_leaves = InFlight::scatter(
          matmul(dy, all_weight, false, !trans_weight), *roles.input);
    }
    // The sum of dX travels while dW is computed
    if (needs_weight) {
      const Tensor all_x =
          kept_x.defined() ? kept_x : as_matrix(x_arrives.wait());
      const Tensor dw = trans_weight ? matmul(dy, all_x, true, false)
                                     : matmul(all_x, dy, true, false);
      if (needs_x) result[0] = reshape(dx_leaves.wait(), x.shape());
      const GradientScope kind(weight);
      result[1] = InFlight::scatter(dw, *roles.weight).wait();
    } else if (needs_x) {
      result[0] = reshape(dx_leaves.wait(), x.shape());
    }
    return result;
  });
  return with_layout(y, swapped(layout));
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Cube& cube) {
  const Layout layout = layout_of(x);
  if (cube.num_ranks() == 1) {
    return with_layout(shardbook::linear(x, weight, bias), swapped(layout));
  }
  const Tensor y = product(x, weight, cube);
  if (!bias.defined()) return y;
  return add(y, replicated(bias, cube.roles(layout).output_weight));
}

Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  const Cube& cube, double eps) {
  const Layout layout = layout_of(x);
  const Roles& roles = cube.roles(layout);
  return with_layout(split_layer_norm(x, replicated(gamma, roles.input_weight),
                                      replicated(beta, roles.input_weight),
                                      *roles.output, eps),
                     layout);
}

Tensor rms_norm(const Tensor& x, const Tensor& gamma, const Cube& cube,
                double eps) {
  const Layout layout = layout_of(x);
  const Roles& roles = cube.roles(layout);
  return with_layout(split_rms_norm(x, replicated(gamma, roles.input_weight),
                                    *roles.output, eps),
                     layout);
}

// --- Embedding -------------------------------------------------------------------

Tensor embedding(const Tensor& table, const Tensor& ids, const Cube& cube) {
  const Tensor own = own_rows(ids, cube, Layout::kStraight);
  return with_layout(
      shardbook::embedding(replicated(table, cube.straight.input_weight), own),
      Layout::kStraight);
}

Tensor vocabulary_parallel_embedding(const Tensor& table, const Tensor& ids,
                                     const Cube& cube) {
  (void)own_rows(ids, cube,
                 Layout::kStraight);  // Checks that the batch divides
  const std::int64_t rows = ids.size(0) / cube.l();
  const Tensor own =
      ids.rows_view(cube.place.i * rows, (cube.place.i + 1) * rows);
  const Tensor block = gather_rows(table, *cube.straight.weight);
  const Tensor found = embedding_part(block, own, cube.place.j * block.size(0));
  return with_layout(scatter_rows(found, *cube.straight.input),
                     Layout::kStraight);
}

// --- Logits and loss -------------------------------------------------------------

Tensor classifier(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Cube& cube) {
  const Roles& roles = cube.roles(layout_of(x));
  const Tensor w = replicated(weight, roles.input_weight);
  const Tensor partial = matmul(as_matrix(x), w, false, true);
  Tensor logits = sum_over(partial, *roles.output);
  if (bias.defined()) {
    logits = add(logits, replicated(bias, roles.input_weight));
  }
  return reshape(logits, with_last(x.shape(), weight.size(0)));
}

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const Cube& cube) {
  const Tensor rows = own_rows(targets, cube, Layout::kStraight);
  return mean_loss_over_ranks(
      [&](Reduction reduction) {
        return shardbook::cross_entropy(logits, rows, reduction);
      },
      rows, {cube.straight.input, cube.straight.weight});
}

Tensor vocabulary_parallel_cross_entropy(const Tensor& logits,
                                         const Tensor& targets,
                                         const Cube& cube,
                                         std::int64_t vocabulary) {
  const Layout layout = layout_of(logits);
  const Roles& roles = cube.roles(layout);
  const std::int64_t own = logits.size(-1);
  const std::int64_t first = cube.place.column_part(layout) * own;
  const Tensor rows = own_rows(targets, cube, layout);
  return mean_loss_over_ranks(
      [&](Reduction reduction) {
        return split_cross_entropy(logits, rows, first, *roles.output,
                                   vocabulary, reduction);
      },
      rows, {roles.input, roles.weight});
}

// --- GPT -------------------------------------------------------------------------

namespace {

/// The second linear layer of each branch reads what the first one swapped.
Layout input_layout(const BlockPart& part) {
  return part.cut == shardbook::Cut::kRows ? Layout::kSwapped
                                           : Layout::kStraight;
}

void check_layout(const std::string& name, const Tensor& x, Layout layout) {
  SB_CHECK(layout_of(x) == layout, name, ": its weight lies for ",
           layout_name(layout), " activations; this one is ",
           layout_name(layout_of(x)),
           ": an odd number of linear layers lies before it");
}

}  // namespace

LayerFactory layers(const Cube& cube, std::int64_t vocabulary) {
  summa::PartLayers parts;
  parts.layout = [place = cube.place](const summa::Parameter& parameter) {
    return layout(parameter, place);
  };
  parts.linear = [cube](const std::string& name, const BlockPart& part,
                        const Tensor& x, const Tensor& weight,
                        const Tensor& bias) {
    check_layout(name, x, input_layout(part));
    return linear(x, weight, bias, cube);
  };
  parts.norm = [cube](const std::string& name, const Tensor& x,
                      const Tensor& gamma, const Tensor& beta, double eps) {
    check_layout(name, x, Layout::kStraight);
    return beta.defined() ? layer_norm(x, gamma, beta, cube, eps)
                          : rms_norm(x, gamma, cube, eps);
  };
  parts.embedding = [cube](const Tensor& table, const Tensor& ids) {
    return vocabulary_parallel_embedding(table, ids, cube);
  };
  parts.positions = [cube](const Tensor& rows) {
    return replicated(rows, cube.straight.input_weight);
  };
  parts.dropout = [cube](const Tensor& x, double p) {
    return summa::block_dropout(x, p, cube.place.block(layout_of(x)));
  };
  parts.logits = [cube](const Tensor& x, const Tensor& table) {
    return product(x, table, cube, /*trans_weight=*/true);
  };
  LayerFactory made = factory_of(parts);
  // Heads lie as the first layer of the branch leaves them
  made.head_rank = cube.place.column_part(Layout::kSwapped);
  made.head_ranks = cube.l();
  made.attention = [cube](const Tensor& qkv, const AttentionOptions& options) {
    const Layout layout = layout_of(qkv);
    return with_layout(
        summa::block_attention(qkv, options, cube.place.block(layout)), layout);
  };
  made.loss = [cube, vocabulary](const Tensor& logits, const Tensor& targets) {
    return vocabulary_parallel_cross_entropy(logits, targets, cube, vocabulary);
  };
  return made;
}

Shards layout(const summa::Parameter& parameter, const Place& place) {
  using summa::Parameter;
  const BlockPart& part = parameter.part;
  switch (parameter.kind) {
    case Parameter::kTable:
      return table_part(place);
    case Parameter::kPositions:
      return column_part(place, Layout::kStraight, 1);
    case Parameter::kWeight:
      return weight_part(place, input_layout(part), part.columns);
    case Parameter::kBias:
      return column_part(place, swapped(input_layout(part)), 0, part.columns);
    case Parameter::kNorm:
      return column_part(place, Layout::kStraight);
    default:
      return {};
  }
}

}  // namespace shardbook::cube
