// The hooks of parallelize_module: inputs and outputs change their layout, and
// parameters are lent to a forward in another one.

#include <memory>
#include <utility>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/parallelize.h"
#include "chapters/11_dtensor/recipes.h"
#include "core/check.h"
#include "core/layers.h"

namespace shardbook::dtensor {
namespace {

using Kind = Style::Kind;

Shape with_last(Shape shape, std::int64_t size) {
  shape.back() = size;
  return shape;
}

// Shard(-1) of a tensor with this many dims.
Placement last_of(const Tensor& x) { return shard(x.ndim() - 1); }

// This rank's plain tensor as a DTensor: shards of the last dim may be uneven,
// others are equal.
DTensor wrap(const Tensor& x, const Mesh& mesh, const Placement& placement,
             std::int64_t last_size) {
  if (placement == last_of(x)) {
    return from_local(x, mesh, {placement}, with_last(x.shape(), last_size));
  }
  return from_local(x, mesh, {placement});
}

// --- Column ------------------------------------------------------------------------

// Every rank uses all of x for its own columns: gradients of x are terms. This
// is Megatron's f, or its all-gather where x comes in shards.
void add_colwise(Module& module, const Mesh& mesh, const Style& style,
                 std::int64_t in, std::int64_t out) {
  const Placement input = style.input.value_or(replicate());
  const bool is_lookup = dynamic_cast<Embedding*>(&module) != nullptr;
  if (!is_lookup) {
    module.add_forward_pre_hook([=](Module&, Tensors& x) {
      x[0] = wrap(x[0], mesh, input, in)
                 .redistribute({replicate()})
                 .to_local({partial()});
    });
  }
  if (!style.output) return;
  const Placement output = *style.output;
  module.add_forward_hook([=](Module&, Tensors& y) {
    y[0] =
        wrap(y[0], mesh, last_of(y[0]), out).redistribute({output}).to_local();
  });
}

// --- Row -----------------------------------------------------------------------------

// The ranks' products are terms of a sum. The bias must wait until they are
// added up, so the layer computes without it.
void add_rowwise_linear(Module& module, const Mesh& mesh, const Style& style,
                        std::int64_t in) {
  const auto bias = std::make_shared<Tensor>();
  module.add_forward_pre_hook([=](Module& module, Tensors& x) {
    auto& linear = dynamic_cast<Linear&>(module);
    if (linear.bias.defined()) *bias = linear.bias;
    linear.bias = Tensor();
    if (style.input && *style.input != last_of(x[0])) {
      x[0] = wrap(x[0], mesh, *style.input, in)
                 .redistribute({last_of(x[0])})
                 .to_local();
    }
  });
  const Placement output = style.output.value_or(replicate());
  module.add_forward_hook([=](Module& module, Tensors& y) {
    DTensor sum = from_local(y[0], mesh, {partial()}).redistribute({output});
    if (bias->defined()) {
      sum = add(sum, from_local(*bias, mesh, {replicate()}));
      dynamic_cast<Linear&>(module).bias = *bias;
    }
    y[0] = sum.to_local();
  });
}

// Tokens of other ranks' rows read zeros. The layer's own lookup would refuse
// them, so it gets a single token of this rank.
void add_rowwise_embedding(Module& module, const Mesh& mesh, const Style& style,
                           std::int64_t rows) {
  SB_CHECK(!style.input || style.input->is_replicate(),
           "parallelize_module: a rowwise Embedding with input ",
           text(*style.input), "; each rank needs all indices, give R");
  const Part part = ceil_part(rows, mesh.shape()[0], mesh.coordinate()[0]);
  SB_CHECK(part.size > 0, "parallelize_module: an Embedding of ", rows,
           " rows leaves rank ", mesh.coordinate()[0], " of ", mesh.text(),
           " without rows; give fewer ranks");
  const auto tokens = std::make_shared<Tensor>();
  module.add_forward_pre_hook([=](Module&, Tensors& x) {
    *tokens = std::exchange(x[0], Tensor::zeros({1}, x[0].options()));
  });
  const Placement output = style.output.value_or(replicate());
  module.add_forward_hook([=](Module& module, Tensors& y) {
    const Tensor& table = dynamic_cast<Embedding&>(module).weight;
    y[0] = from_local(embedding_part(table, *tokens, part.offset), mesh,
                      {partial()})
               .redistribute({output})
               .to_local();
    *tokens = Tensor();
  });
}

// --- Sequence ------------------------------------------------------------------------

// Each rank normalises its own tokens: gradients of the parameters are terms.
// Dropout must draw at the global places of these tokens, which only a DTensor
// knows: the module passes its input on, and the hook after it drops.
void add_sequence(Module& module, const Mesh& mesh, const Style& style) {
  const Placement cut = shard(style.sequence_dim);
  const Placement input = style.input.value_or(cut);
  const Placement output = style.output.value_or(cut);
  lend_parameters(module, mesh, replicate(), {}, [=](Module& module) {
    const auto p = std::make_shared<double>(0);
    module.add_forward_pre_hook([=](Module& module, Tensors& x) {
      if (input != cut) {
        x[0] = from_local(x[0], mesh, {input}).redistribute({cut}).to_local();
      }
      if (auto* drop = dynamic_cast<Dropout*>(&module)) {
        *p = std::exchange(drop->p, 0.0);
      }
    });
    module.add_forward_hook([=](Module& module, Tensors& y) {
      if (auto* drop = dynamic_cast<Dropout*>(&module)) {
        drop->p = *p;
        if (drop->is_training()) {
          y[0] = dropout(from_local(y[0], mesh, {cut}), *p).to_local();
        }
      }
      if (output != cut) {
        y[0] = from_local(y[0], mesh, {cut}).redistribute({output}).to_local();
      }
    });
  });
}

}  // namespace

void add_layout_hooks(Module& module, const Mesh& mesh, const Style& style,
                      std::int64_t in, std::int64_t out) {
  switch (style.kind) {
    case Kind::kColwise:
      return add_colwise(module, mesh, style, in, out);
    case Kind::kRowwise:
      if (dynamic_cast<Embedding*>(&module) != nullptr) {
        return add_rowwise_embedding(module, mesh, style, in);
      }
      return add_rowwise_linear(module, mesh, style, in);
    case Kind::kSequence:
      return add_sequence(module, mesh, style);
    default:
      SB_CHECK(false, "add_layout_hooks: resolve pairwise styles first");
  }
}

}  // namespace shardbook::dtensor
