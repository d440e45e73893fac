#pragma once

// Tensor parallelism by a plan: which module is cut how.
//
//   parallelize_module(gpt, Mesh(devices, {"tp"}),
//                      {{"transformer.h.*.attn", pairwise()},
//                       {"transformer.h.*.mlp", pairwise()}});
//   auto optimizer = make_optimizer("adamw", gpt.parameters(), options);  // after
//
// The model's code does not change. Parameters become this rank's blocks, and
// hooks bring inputs and outputs to the layouts that a style asks for:
//
//   style         weight [in, out], bias   input      output   calls fwd / bwd
//   colwise       S(1), S(0)               R          S(-1)    - / all_reduce
//   rowwise       S(0), R                  S(-1)      R        all_reduce / -
//   pairwise      col, row, col, row, ..   R          R        each pair: both
//   pairwise_sequence  the same            S(0)       S(0)     all_gather and
//                                                              reduce_scatter
//   sequence      R (norms, dropout)       S(dim)     S(dim)   - / all_reduce of
//                                                              parameters
//
// The recipe of a decoder's block on own tokens [b, s/t, h] is sequence() for
// norms, and pairwise() with input and output shard(1) for attention and MLP:
// queries, keys and values are one matrix, so no PrepareModuleInput is needed.
//
// Between modules, tensors are plain: this rank's block. Embeddings: colwise
// S(1), rowwise S(0) with the input R. Mesh axes: one.
// torch.distributed.tensor.parallel; `pairwise` of torch 2.0,
// `pairwise_sequence` was its SequenceParallel of torch 2.1, `sequence` is that
// of torch 2.3 and later.

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/11_dtensor/dtensor.h"
#include "core/module.h"
#include "core/shards.h"

namespace shardbook::dtensor {

struct Style {
  enum class Kind {
    kColwise,
    kRowwise,
    kPairwise,
    kPairwiseSequence,
    kSequence
  };
  Kind kind = Kind::kColwise;
  /// Layouts of the input and of the output; the table's by default.
  std::optional<Placement> input = {}, output = {};
  /// colwise: columns that lie side by side, each cut by itself (queries, keys
  /// and values; gate and up). Empty: one.
  std::vector<Columns> columns = {};
  std::int64_t sequence_dim = 1;  ///< of `sequence`
};
Style colwise(std::vector<Columns> columns = {});
Style rowwise();
/// An even number of Linears below the module, in order; of a decoder's attention
/// the first by heads. Norms of heads see a rank's own: their gradients are terms.
Style pairwise();
Style pairwise_sequence();
Style sequence(std::int64_t dim = 1);

/// Names of modules and their styles; '*' stands for one component of a path.
using Plan = std::vector<std::pair<std::string, Style>>;

/// How a parameter was cut.
struct CutParameter {
  std::string name;
  Placement placement;
  std::vector<Columns> columns = {};
  Shape shape = {};  ///< of the whole
};

/// Cuts the parameters and adds the hooks. Parameters that no style names stay
/// whole. Throws Error for a name that nothing matches, a module that a style
/// does not know, an odd number of Linears in a pairwise style, heads that do
/// not divide, and where anything else holds a replaced parameter: an optimizer
/// created earlier would update tensors that no module uses.
///
/// Communication: none; all ranks have the same parameters.
std::vector<CutParameter> parallelize_module(Module& root, const Mesh& mesh,
                                             const Plan& plan);

/// The placement of a parameter, by its name in the whole module.
using Partition = std::function<Placement(const std::string& name)>;
/// Converts a plain tensor: from_local, redistribute, to_local.
using LayoutChange = std::function<Tensor(const Tensor& x, const Mesh& mesh)>;

/// The same without a plan: `partition` cuts each parameter (default:
/// replicas), `input` and `output` convert the root's input and output. Each
/// may be left out. torch.distributed.tensor's distribute_module. Errors and
/// communication as above.
std::vector<CutParameter> distribute_module(
    Module& root, const Mesh& mesh, const Partition& partition,
    const LayoutChange& input = nullptr, const LayoutChange& output = nullptr);

/// The hooks alone, for a module whose parameters are blocks already. `in` and
/// `out` are the sizes of the whole weight.
void add_layout_hooks(Module& module, const Mesh& mesh, const Style& style,
                      std::int64_t in, std::int64_t out);

/// Every parameter of a parallelized module, whole. Collective.
std::vector<NamedTensor> full_parameters(Module& root, const Mesh& mesh,
                                         const std::vector<CutParameter>& cuts);

}  // namespace shardbook::dtensor
