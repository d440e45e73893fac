#include "chapters/11_dtensor/dtensor.h"

#include "chapters/11_dtensor/redistribute.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::dtensor {
namespace {

std::shared_ptr<GradientLayout> new_layout() {
  return std::make_shared<GradientLayout>();
}

// Averages travel as sums: gradients are linear in their terms.
Tensor as_sums(Tensor grad, const Mesh& mesh, Placements& placements) {
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    Placement& placement = placements[axis];
    if (!placement.is_partial() || placement.op != PartialOp::kAvg) continue;
    grad = scale(grad, 1.0 / static_cast<double>(mesh.shape()[axis]));
    placement = partial();
  }
  return grad;
}

Shape equal_shards(const Tensor& local, const Mesh& mesh,
                   const Placements& placements) {
  Shape shape = local.shape();
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    SB_CHECK(placements[axis].dim >= 0 && placements[axis].dim < local.ndim(),
             "from_local: ", text(placements[axis]), " of a tensor ",
             shape_text(local.shape()));
    shape[static_cast<std::size_t>(placements[axis].dim)] *= mesh.shape()[axis];
  }
  return shape;
}

void check_local(const Tensor& local, const Mesh& mesh,
                 const Placements& placements, const Shape& shape) {
  const Shape expected =
      local_part(shape, placements, mesh.shape(), mesh.coordinate()).shape;
  SB_CHECK(local.shape() == expected, "from_local over ", mesh.text(), ": ",
           text(placements), " of ", shape_text(shape), " is ",
           shape_text(expected), " on this rank, and the array is ",
           shape_text(local.shape()),
           "; give the global shape where shards are uneven");
}

// Compares with the replica of coordinate 0 of each axis.
void check_replicas(const Tensor& local, const Mesh& mesh,
                    const Placements& placements) {
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_replicate() || local.numel() == 0) continue;
    const Tensor first = local.clone();
    mesh.group(axis).broadcast(first, 0, "run_check").wait();
    SB_CHECK(local.is_meta() || bitwise_equal(first, local), "from_local over ",
             mesh.text(), ": R on axis '", mesh.axes()[axis],
             "', and coordinate ", mesh.coordinate()[axis],
             " has other values than coordinate 0");
  }
}

// Shards are equal only if every rank has the same shape.
void check_sizes(const Tensor& local, const Mesh& mesh,
                 const Placements& placements) {
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto shapes = mesh.group(axis).exchange(shape_text(local.shape()));
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      SB_CHECK(shapes[i] == shapes[0], "from_local over ", mesh.text(), ": ",
               text(placements[axis]), " on axis '", mesh.axes()[axis], "' is ",
               shapes[0], " at coordinate 0 and ", shapes[i], " at coordinate ",
               i, "; give the global shape where shards are uneven");
    }
  }
}

}  // namespace

DTensor::DTensor(Tensor local, Mesh mesh, Placements placements, Shape shape,
                 std::shared_ptr<GradientLayout> gradient)
    : local_(std::move(local)),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      shape_(std::move(shape)),
      gradient_(std::move(gradient)) {}

Tensor GradientLayout::add(const DTensor& of, const Tensor& grad,
                           const Placements& placements) {
  Placements from = placements;
  const Tensor sums = as_sums(grad, of.mesh(), from);
  if (!placements_) placements_ = from;
  return redistribute_local(sums, of.mesh(), of.shape(), from, *placements_);
}

Placements GradientLayout::take(const DTensor& of) {
  SB_CHECK(placements_.has_value(), "DTensor ", shape_text(of.shape()), " ",
           text(of.placements()),
           ": its local() was used outside; call to_local()");
  const Placements placements = *placements_;
  placements_.reset();
  return placements;
}

DTensor DTensor::redistribute(const Placements& to) const {
  check_placements("redistribute", shape_, to, mesh().shape());
  if (to == placements_) return *this;
  DTensor result(Tensor(), mesh(), to, shape_, new_layout());
  const DTensor from = layout(), onto = result;
  result.local_ = autograd::custom_function(
      "redistribute", {local_},
      [&](const Tensors& inputs) {
        return Tensors{
            redistribute_local(inputs[0], mesh(), shape_, placements_, to)};
      },
      [from, onto](const Tensors& grads) {
        const Placements target = normalized(from.placements());
        const Tensor grad =
            redistribute_local(grads[0], from.mesh(), from.shape(),
                               onto.gradient()->take(onto), target);
        return Tensors{from.gradient()->add(from, grad, target)};
      })[0];
  return result;
}

Tensor DTensor::to_local(const Placements& grad_placements) const {
  check_placements("to_local", shape_, grad_placements, mesh().shape());
  const DTensor self = layout();
  const Placements natural = normalized(placements_);
  for (std::size_t axis = 0; axis < natural.size(); ++axis) {
    SB_CHECK(natural[axis].is_shard() || !grad_placements[axis].is_shard(),
             "to_local: a gradient ", text(grad_placements), " for ",
             text(placements_), "; the gradient of a replica is R or P");
  }
  return autograd::custom_function(
      "to_local", {local_}, [](const Tensors& inputs) { return inputs; },
      [self, grad_placements](const Tensors& grads) {
        // A shard's gradient must be a shard before it is added
        Placements to = grad_placements;
        const Placements natural = normalized(self.placements());
        for (std::size_t axis = 0; axis < to.size(); ++axis) {
          if (natural[axis].is_shard()) to[axis] = natural[axis];
        }
        const Tensor grad = redistribute_local(
            grads[0], self.mesh(), self.shape(), grad_placements, to);
        return Tensors{self.gradient()->add(self, grad, to)};
      })[0];
}

Tensor DTensor::full_tensor() const {
  return redistribute(Placements(mesh().ndim(), replicate())).to_local();
}

DTensor from_local(const Tensor& local, const Mesh& mesh,
                   const Placements& placements,
                   const std::optional<Shape>& shape, bool run_check) {
  SB_CHECK(placements.size() == mesh.ndim(), "from_local: ", text(placements),
           " are ", placements.size(), " placements for the mesh ",
           mesh.text());
  const Shape global = shape ? *shape : equal_shards(local, mesh, placements);
  check_placements("from_local", global, placements, mesh.shape());
  if (run_check && !shape) check_sizes(local, mesh, placements);
  check_local(local, mesh, placements, global);
  if (run_check) check_replicas(local, mesh, placements);

  DTensor result(Tensor(), mesh, placements, global, new_layout());
  const DTensor self = result;
  Tensor inside = autograd::custom_function(
      "from_local", {local}, [](const Tensors& inputs) { return inputs; },
      [self](const Tensors& grads) {
        return Tensors{redistribute_local(grads[0], self.mesh(), self.shape(),
                                          self.gradient()->take(self),
                                          normalized(self.placements()))};
      })[0];
  return DTensor(inside, mesh, placements, global, self.gradient());
}

DTensor distribute_tensor(const Tensor& whole, const Mesh& mesh,
                          const Placements& placements) {
  check_placements("distribute_tensor", whole.shape(), placements,
                   mesh.shape());
  NoGrad no_grad;
  Tensor local = whole.clone();
  Placements now(mesh.ndim(), replicate());
  for (std::size_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.shape()[axis] == 1) {
      now[axis] = placements[axis];
      continue;
    }
    // Nothing to send on any rank of the axis: redistribute_local cuts it
    if (local.numel() == 0) continue;
    ProcessGroup& group = mesh.group(axis);
    if (!placements[axis].is_shard()) {
      group.broadcast(local, 0, "distribute_tensor").wait();
      continue;
    }
    local = scatter_local(local, group, placements[axis].dim);
    now[axis] = placements[axis];
  }
  // Terms of a partial are made from replicas
  local = redistribute_local(local, mesh, whole.shape(), now, placements);
  return from_local(local.detach(), mesh, placements, whole.shape());
}

DTensor cut_tensor(const Tensor& whole, const Mesh& mesh,
                   const Placements& placements) {
  return from_local(whole, mesh, Placements(mesh.ndim(), replicate()))
      .redistribute(placements);
}

Parameter make_parameter(const Tensor& whole, const Mesh& mesh,
                         const Placements& placements) {
  SB_CHECK(placements == normalized(placements), "a parameter ",
           text(placements), ": terms of a sum cannot be trained; give R or S");
  NoGrad no_grad;
  const MemoryScope kind(MemoryKind::kParameter);
  const Tensor local =
      cut_tensor(whole.detach(), mesh, placements).local().clone();
  local.set_requires_grad();
  return {local, mesh, placements, whole.shape()};
}

}  // namespace shardbook::dtensor
