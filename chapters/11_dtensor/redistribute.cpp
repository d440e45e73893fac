#include "chapters/11_dtensor/redistribute.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/shards.h"

namespace shardbook::dtensor {
namespace {

// Pads x with zeros along `dim`.
Tensor pad_to(const Tensor& x, std::int64_t dim, std::int64_t size) {
  if (x.size(dim) == size) return x;
  const Tensor zeros =
      Tensor::zeros(with_size(x.shape(), dim, size - x.size(dim)), x.options());
  return x.size(dim) == 0 ? zeros : concat({x, zeros}, dim);
}

Tensor cut(const Tensor& x, std::int64_t dim, std::int64_t begin,
           std::int64_t size) {
  if (begin == 0 && size == x.size(dim)) return x;
  return slice(x, dim, begin, begin + size);
}

// All dims before `dim` have one element: parts along `dim` lie end to end.
bool is_outermost(const Shape& shape, std::int64_t dim) {
  return std::all_of(shape.begin(), shape.begin() + dim,
                     [](std::int64_t n) { return n == 1; });
}

// The parts of x along `dim`, each padded to ceil(n / parts), end to end: what
// collectives send.
Tensor parts_end_to_end(const Tensor& x, std::int64_t dim, std::int64_t parts) {
  const std::int64_t full = ceil_div(x.size(dim), parts);
  const Tensor padded = pad_to(x, dim, parts * full);
  if (is_outermost(x.shape(), dim)) return reshape(padded, {padded.numel()});
  Tensors pieces;
  for (std::int64_t i = 0; i < parts; ++i) {
    pieces.push_back(
        reshape(cut(padded, dim, i * full, full), {padded.numel() / parts}));
  }
  return concat(pieces, 0);
}

// One axis of the mesh, for one move.
struct Axis {
  ProcessGroup& group;
  std::int64_t parts;
  std::int64_t index;
  Shape whole;  // see whole_along

  Tensor own_part(const Tensor& x, std::int64_t dim) const {
    const Part part = ceil_part(length(whole, dim), parts, index);
    return cut(x, dim, part.offset, part.size);
  }

  Tensor all_gather(const Tensor& x, std::int64_t dim) const {
    const std::int64_t n = length(whole, dim);
    const Part part = ceil_part(n, parts, index);
    const Shape each = with_size(whole, dim, part.full);
    const Tensor all =
        Tensor::empty({padded_numel(whole, dim, parts)}, x.options());
    {
      MemoryScope kind(MemoryKind::kCommunication);
      group.all_gather(all, pad_to(x, dim, part.full), "redistribute").wait();
    }
    if (is_outermost(whole, dim)) return all.flat_view(0, whole);
    Tensors pieces;
    for (std::int64_t i = 0; i < parts; ++i) {
      const Part of = ceil_part(n, parts, i);
      if (of.size == 0) break;
      pieces.push_back(
          cut(all.flat_view(i * shape_numel(each), each), dim, 0, of.size));
    }
    return concat(pieces, dim);
  }

  Tensor reduce_scatter(const Tensor& x, std::int64_t dim, ReduceOp op) const {
    const Part part = ceil_part(length(whole, dim), parts, index);
    const Tensor mine =
        Tensor::empty(with_size(whole, dim, part.full), x.options());
    {
      MemoryScope kind(MemoryKind::kCommunication);
      group
          .reduce_scatter(mine, parts_end_to_end(x, dim, parts), op,
                          "redistribute")
          .wait();
    }
    return cut(mine, dim, 0, part.size);
  }

  // Cuts the own part along `to`, and sends each other rank its piece.
  Tensor all_to_all(const Tensor& x, std::int64_t from, std::int64_t to) const {
    const std::int64_t n = length(whole, from);
    const std::int64_t full_from = ceil_div(n, parts);
    const Part to_part = ceil_part(length(whole, to), parts, index);
    MemoryScope kind(MemoryKind::kCommunication);
    const Tensor input =
        parts_end_to_end(pad_to(x, from, full_from), to, parts);
    const Tensor output = Tensor::empty({input.numel()}, x.options());
    group.all_to_all(output, input, "redistribute").wait();
    const Shape each =
        with_size(with_size(whole, from, full_from), to, to_part.full);
    Tensors pieces;
    for (std::int64_t i = 0; i < parts; ++i) {
      const Part of = ceil_part(n, parts, i);
      if (of.size == 0) break;
      const Tensor piece = output.flat_view(i * shape_numel(each), each);
      pieces.push_back(cut(cut(piece, from, 0, of.size), to, 0, to_part.size));
    }
    MemoryScope result(MemoryKind::kActivation);
    return concat(pieces, from);
  }

  Tensor all_reduce(const Tensor& x, ReduceOp op) const {
    const Tensor sum = x.clone();
    group.all_reduce(sum, op, "redistribute").wait();
    return sum;
  }

  // Zeros as long as the whole, with the own part in its place.
  Tensor among_zeros(const Tensor& x, std::int64_t dim) const {
    const Tensor all = Tensor::zeros(whole, x.options());
    put_part(all, x, {{dim, index, parts, 1, length(whole, dim)}});
    return all;
  }
};

ReduceOp reduce_op_of(PartialOp op) {
  if (op == PartialOp::kMax) return ReduceOp::kMax;
  if (op == PartialOp::kMin) return ReduceOp::kMin;
  return ReduceOp::kSum;
}

Tensor run_move(const Tensor& x, const Axis& axis, const Move& move) {
  const Placement& from = move.from;
  const Placement& to = move.to;
  const auto ranks = static_cast<double>(axis.parts);
  if (from.is_replicate()) {
    if (to.is_shard()) return axis.own_part(x, to.dim);
    return to.op == PartialOp::kSum ? scale(x, 1 / ranks) : x;
  }
  if (from.is_shard()) {
    if (to.is_replicate()) return axis.all_gather(x, from.dim);
    if (to.is_shard()) return axis.all_to_all(x, from.dim, to.dim);
    SB_CHECK(to.op == PartialOp::kSum, "redistribute ", text(from), " to ",
             text(to), ": zeros are neutral in a sum only; go by way of R");
    return axis.among_zeros(x, from.dim);
  }
  const ReduceOp op = reduce_op_of(from.op);
  const Tensor reduced = to.is_shard() ? axis.reduce_scatter(x, to.dim, op)
                                       : axis.all_reduce(x, op);
  return from.op == PartialOp::kAvg ? scale(reduced, 1 / ranks) : reduced;
}

}  // namespace

Tensor redistribute_local(const Tensor& local, const Mesh& mesh,
                          const Shape& global, const Placements& from,
                          const Placements& to) {
  check_placements("redistribute", global, to, mesh.shape());
  NoGrad no_grad;
  Tensor x = local;
  Placements now = from;
  for (const Move& move : moves_between(from, to)) {
    const Axis axis{
        mesh.group(move.axis), mesh.shape()[move.axis],
        mesh.coordinate()[move.axis],
        whole_along(move.axis, now, global, mesh.shape(), mesh.coordinate())};
    now[move.axis] = move.to;
    if (axis.parts == 1) continue;
    if (shape_numel(axis.whole) == 0) {
      // Nothing to send: the same on all ranks of the axis
      x = Tensor::empty(
          local_part(global, now, mesh.shape(), mesh.coordinate()).shape,
          x.options());
      continue;
    }
    x = run_move(x, axis, move);
  }
  return x;
}

Tensor scatter_local(const Tensor& whole, ProcessGroup& group,
                     std::int64_t dim) {
  const Part part = ceil_part(whole.size(dim), group.size(), group.rank());
  const Tensor mine =
      Tensor::empty(with_size(whole.shape(), dim, part.full), whole.options());
  group
      .scatter(mine, parts_end_to_end(whole, dim, group.size()), /*root=*/0,
               "distribute_tensor")
      .wait();
  return cut(mine, dim, 0, part.size);
}

}  // namespace shardbook::dtensor
