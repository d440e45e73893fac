#pragma once

// DTensor: one tensor that lies over many ranks.
//
// A DTensor is the array of this rank, and how the arrays of all ranks make up
// one tensor. Operations (dtensor_ops.h) compute on the local arrays and know which
// layout comes out; `redistribute` is the only place that communicates.
//
//   DTensor x = distribute_tensor(whole, mesh, {shard(0), replicate()});
//   DTensor y = x.redistribute({replicate(), shard(1)});
//   y.full_tensor();                               // equals `whole`
//
// Gradients flow through core's autograd and have layouts of their own. The
// gradient of a shard is a shard. The gradient of a replica is a replica, or a
// partial where ranks used it for different parts of the result. `redistribute`
// sends a gradient back from the layout that it has:
//
//   forward     gradient arrives as    backward
//   S(a) -> R   R                      slice
//   S(a) -> R   P(sum)                 reduce-scatter
//   R -> S(a)   S(a)                   all-gather
//   P -> R      R                      nothing
//
// Layouts of gradients are known when backward runs, so the sum of two
// gradients brings the second to the layout of the first. All gradients are
// those of the whole tensor: no factor depends on the number of ranks.
//
// A DTensor belongs to one rank; every rank of the mesh makes the same calls in
// the same order.

#include <memory>
#include <optional>

#include "chapters/11_dtensor/mesh.h"
#include "chapters/11_dtensor/placement.h"
#include "core/tensor.h"

namespace shardbook::dtensor {

class GradientLayout;

class DTensor {
 public:
  DTensor() = default;

  bool defined() const { return local_.defined(); }
  /// This rank's block, or term.
  const Tensor& local() const { return local_; }
  const Mesh& mesh() const { return *mesh_; }
  const Placements& placements() const { return placements_; }
  /// The whole tensor's.
  const Shape& shape() const { return shape_; }
  std::int64_t ndim() const { return static_cast<std::int64_t>(shape_.size()); }
  DType dtype() const { return local_.dtype(); }

  /// The same tensor in another layout.
  ///
  /// Communication: calls_of (redistribute.h) forward; in backward, the calls
  /// from the gradient's layout to normalized(placements()).
  DTensor redistribute(const Placements& to) const;

  /// This rank's array, for ordinary operations. Its gradient is a piece of a
  /// tensor in layout `grad_placements`: by default the forward's, with
  /// replicas for partials. No communication.
  Tensor to_local() const { return to_local(normalized(placements_)); }
  Tensor to_local(const Placements& grad_placements) const;

  /// The whole tensor, on every rank.
  Tensor full_tensor() const;

  /// For operations: an array with this layout, whose gradient is noted in
  /// `gradient`.
  DTensor(Tensor local, Mesh mesh, Placements placements, Shape shape,
          std::shared_ptr<GradientLayout> gradient);
  const std::shared_ptr<GradientLayout>& gradient() const { return gradient_; }
  /// The same without its array: graph nodes keep only layouts.
  DTensor layout() const {
    return DTensor(Tensor(), *mesh_, placements_, shape_, gradient_);
  }

 private:
  Tensor local_;
  std::optional<Mesh> mesh_;
  Placements placements_;
  Shape shape_;
  std::shared_ptr<GradientLayout> gradient_;
};

/// The layout in which the gradient of one DTensor arrives.
class GradientLayout {
 public:
  /// Brings `grad` to the layout of the first gradient that arrived. Collective
  /// where the layouts differ.
  Tensor add(const DTensor& of, const Tensor& grad,
             const Placements& placements);
  /// Returns the sum's layout and resets it for the next backward.
  Placements take(const DTensor& of);

 private:
  std::optional<Placements> placements_;
};

/// Wraps this rank's array. The gradient comes back in the same layout, with
/// replicas for partials. Without `shape`, shards are equal. With `run_check`,
/// throws Error if replicas differ from coordinate 0's, or sizes from the
/// layout's.
///
/// Communication: none; with run_check one broadcast per axis that replicates.
DTensor from_local(const Tensor& local, const Mesh& mesh,
                   const Placements& placements,
                   const std::optional<Shape>& shape = std::nullopt,
                   bool run_check = false);

/// Distributes the `whole` of the rank at coordinate 0; the other ranks pass a
/// tensor of the same shape. Not recorded for backward.
///
/// Communication, axis by axis: a scatter for a shard, else a broadcast.
DTensor distribute_tensor(const Tensor& whole, const Mesh& mesh,
                          const Placements& placements);

/// The same where all ranks have equal tensors already. No communication.
DTensor cut_tensor(const Tensor& whole, const Mesh& mesh,
                   const Placements& placements);

/// A leaf that is trained: this rank's block and its layout. The gradient of
/// `local` always has this layout: partials are reduced.
struct Parameter {
  Tensor local;
  Mesh mesh;
  Placements placements;
  Shape shape;

  /// The parameter as an operand: call it in each forward.
  DTensor operator()() const {
    return from_local(local, mesh, placements, shape);
  }
};
/// From equal tensors on all ranks: each keeps a copy of its block. Placements
/// are R or S. No communication.
Parameter make_parameter(const Tensor& whole, const Mesh& mesh,
                         const Placements& placements);

}  // namespace shardbook::dtensor
