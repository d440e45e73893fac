#include "chapters/10_tensor_parallel_3d/cube_layers.h"

#include <memory>
#include <utility>

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
using summa::sum_over;

namespace {

Shape with_last(Shape shape, std::int64_t last) {
  shape.back() = last;
  return shape;
}

}  // namespace

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

Tensor attention(const Tensor& qkv, const AttentionOptions& options,
                 const Cube& cube) {
  const Layout layout = layout_of(qkv);
  const int l = cube.l();
  SB_CHECK(options.heads % l == 0, "attention: ", options.heads,
           " heads do not divide over ", l, " ranks; give ",
           options.heads / l * l + l);
  AttentionOptions own = options;
  own.heads /= l;
  const std::int64_t b = qkv.size(0), s = qkv.size(1);
  own.shard = {{b * l * l, options.heads, s, s},
               {b * cube.place.row_part(layout),
                own.heads * cube.place.column_part(layout), 0, 0},
               {}};
  return with_layout(shardbook::attention(qkv, own), layout);
}

Tensor dropout(const Tensor& x, double p, const Cube& cube) {
  if (p == 0) return x;
  const Layout layout = layout_of(x);
  ShardView view;
  view.global_shape = x.shape();
  view.global_shape.front() *= cube.l() * cube.l();
  view.global_shape.back() *= cube.l();
  view.offset.assign(x.shape().size(), 0);
  view.offset.front() = cube.place.row_part(layout) * x.size(0);
  view.offset.back() = cube.place.column_part(layout) * x.size(-1);
  return shardbook::dropout(x, p, view);
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
  own_rows(ids, cube, Layout::kStraight);  // The batch divides
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

// --- Modules ---------------------------------------------------------------------

Linear3D::Linear3D(const std::string& name, std::int64_t in, std::int64_t out,
                   double stddev, InitOptions init, const Cube& cube,
                   Layout layout, std::int64_t blocks)
    : name_(name), cube_(cube), layout_(layout) {
  init.shards = weight_part(cube.place, layout, blocks);
  weight = make_parameter(name + ".weight", {in, out}, stddev, init);
  init.shards = column_part(cube.place, swapped(layout), 0, blocks);
  bias = make_constant_parameter({out}, 0, init);
}

Tensor Linear3D::forward(const Tensor& x) {
  SB_CHECK(layout_of(x) == layout_, name_, ": its weight lies for ",
           layout_name(layout_), " activations; this one is ",
           layout_name(layout_of(x)),
           ": an odd number of linear layers lies before it");
  return linear(x, weight, bias, cube_);
}

void Linear3D::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

LayerNorm3D::LayerNorm3D(std::int64_t width, double eps, InitOptions init,
                         const Cube& cube, Layout layout)
    : eps(eps), cube_(cube), layout_(layout) {
  init.shards = column_part(cube.place, layout);
  weight = make_constant_parameter({width}, 1, init);
  bias = make_constant_parameter({width}, 0, init);
}

Tensor LayerNorm3D::forward(const Tensor& x) {
  SB_CHECK(layout_of(x) == layout_, "LayerNorm3D: its gain lies for ",
           layout_name(layout_), " activations; this one is ",
           layout_name(layout_of(x)));
  return layer_norm(x, weight, bias, cube_, eps);
}

void LayerNorm3D::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

Embedding3D::Embedding3D(const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev, InitOptions init,
                         const Cube& cube)
    : cube_(cube) {
  init.shards = column_part(cube.place, Layout::kStraight, 1);
  weight = make_parameter(name + ".weight", {rows, width}, stddev, init);
}

Tensor Embedding3D::first_rows(std::int64_t rows) const {
  SB_CHECK(rows <= weight.size(0), "gpt: ", rows, " tokens, the model has ",
           weight.size(0), " positions");
  return replicated(slice(weight, 0, 0, rows), cube_.straight.input_weight);
}

void Embedding3D::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

VocabParallelEmbedding3D::VocabParallelEmbedding3D(
    const std::string& name, std::int64_t rows, std::int64_t width,
    double stddev, InitOptions init, const Cube& cube)
    : cube_(cube) {
  init.shards = table_part(cube.place);
  weight = make_parameter(name + ".weight", {rows, width}, stddev, init);
}

void VocabParallelEmbedding3D::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

// --- GPT -------------------------------------------------------------------------

namespace {

bool contains(const std::string& name, const std::string& part) {
  return name.find(part) != std::string::npos;
}

/// The second linear layer of each branch reads what the first one swapped.
Layout input_layout(const std::string& name) {
  return contains(name, ".c_proj") ? Layout::kSwapped : Layout::kStraight;
}

/// Queries, keys and values are three blocks of columns, each cut by heads.
std::int64_t blocks_of(const std::string& name) {
  return contains(name, ".c_attn") ? 3 : 1;
}

}  // namespace

LayerFactory layers(const Cube& cube, std::int64_t vocabulary) {
  LayerFactory made;
  made.linear = [cube](const std::string& name, std::int64_t in,
                       std::int64_t out, double stddev,
                       const InitOptions& init) -> AnyModule {
    return {std::make_unique<Linear3D>(name, in, out, stddev, init, cube,
                                       input_layout(name), blocks_of(name))};
  };
  made.embedding = [cube](const std::string& name, std::int64_t rows,
                          std::int64_t width, double stddev,
                          const InitOptions& init) -> AnyModule {
    return {std::make_unique<VocabParallelEmbedding3D>(name, rows, width,
                                                       stddev, init, cube)};
  };
  made.position_embedding = [cube](const std::string& name, std::int64_t rows,
                                   std::int64_t width, double stddev,
                                   const InitOptions& init) -> AnyModule {
    return {
        std::make_unique<Embedding3D>(name, rows, width, stddev, init, cube)};
  };
  made.positions = [](AnyModule& wpe, const Tensor& tokens) {
    return wpe.as<Embedding3D>().first_rows(tokens.size(-1));
  };
  made.layer_norm = [cube](const std::string&, std::int64_t width, double eps,
                           const InitOptions& init) -> AnyModule {
    return {std::make_unique<LayerNorm3D>(width, eps, init, cube)};
  };
  made.attention = [cube](const Tensor& qkv, const AttentionOptions& options) {
    return attention(qkv, options, cube);
  };
  made.dropout = [cube](double p) -> AnyModule {
    return {std::make_unique<Dropout3D>(p, cube)};
  };
  made.logits = [cube](const Tensor& x, AnyModule& wte) {
    return product(x, wte.as<VocabParallelEmbedding3D>().weight, cube,
                   /*trans_weight=*/true);
  };
  made.loss = [cube, vocabulary](const Tensor& logits, const Tensor& targets) {
    return vocabulary_parallel_cross_entropy(logits, targets, cube, vocabulary);
  };
  return made;
}

Shards layout(const std::string& name, const Place& place) {
  if (name == "transformer.wte.weight") return table_part(place);
  if (name == "transformer.wpe.weight") {
    return column_part(place, Layout::kStraight, 1);
  }
  if (contains(name, ".ln_")) return column_part(place, Layout::kStraight);
  const Layout input = input_layout(name);
  const std::string bias = ".bias";
  if (name.size() > bias.size() &&
      name.compare(name.size() - bias.size(), bias.size(), bias) == 0) {
    return column_part(place, swapped(input), 0, blocks_of(name));
  }
  return weight_part(place, input, blocks_of(name));
}

}  // namespace shardbook::cube
