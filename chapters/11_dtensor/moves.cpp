#include "chapters/11_dtensor/moves.h"

namespace shardbook::dtensor {

Shape whole_along(std::size_t axis, Placements placements, const Shape& global,
                  const Shape& mesh,
                  const std::vector<std::int64_t>& coordinate) {
  placements[axis] = replicate();
  return local_part(global, placements, mesh, coordinate).shape;
}

std::int64_t ceil_div(std::int64_t n, std::int64_t parts) {
  return (n + parts - 1) / parts;
}

Shape with_size(Shape shape, std::int64_t dim, std::int64_t size) {
  shape[static_cast<std::size_t>(dim)] = size;
  return shape;
}

std::int64_t length(const Shape& shape, std::int64_t dim) {
  return shape[static_cast<std::size_t>(dim)];
}

std::int64_t padded_numel(const Shape& shape, std::int64_t dim,
                          std::int64_t parts) {
  return shape_numel(
      with_size(shape, dim, parts * ceil_div(length(shape, dim), parts)));
}

namespace {

// True when the axes before `axis` that cut `dim` are not the same in both.
bool outer_cuts_differ(const Placements& a, const Placements& b,
                       std::size_t axis, std::int64_t dim) {
  for (std::size_t outer = 0; outer < axis; ++outer) {
    if (a[outer].is_shard(dim) != b[outer].is_shard(dim)) return true;
  }
  return false;
}

// The call of one move; false where it has none.
bool call_of(const Move& move, const Shape& whole, std::int64_t parts,
             Call& call) {
  call.axis = move.axis;
  if (parts == 1) return false;
  if (move.from.is_partial()) {
    const bool scatters = move.to.is_shard();
    call.op = scatters ? CommOp::kReduceScatter : CommOp::kAllReduce;
    call.numel =
        scatters ? padded_numel(whole, move.to.dim, parts) : shape_numel(whole);
  } else if (move.from.is_shard() && move.to.is_replicate()) {
    call.op = CommOp::kAllGather;
    call.numel = padded_numel(whole, move.from.dim, parts);
  } else if (move.from.is_shard() && move.to.is_shard()) {
    call.op = CommOp::kAllToAll;
    const std::int64_t mine = ceil_div(length(whole, move.from.dim), parts);
    call.numel =
        padded_numel(with_size(whole, move.from.dim, mine), move.to.dim, parts);
  } else {
    return false;
  }
  return call.numel > 0;
}

}  // namespace

std::vector<Move> moves_between(const Placements& from, const Placements& to) {
  std::vector<Move> moves;
  Placements now = from;
  const auto move = [&moves, &now](std::size_t axis, const Placement& target) {
    if (now[axis] == target) return;
    // Partials of one kind become another kind via their result
    if (now[axis].is_partial() && target.is_partial()) {
      moves.push_back({axis, now[axis], replicate()});
      now[axis] = replicate();
    }
    moves.push_back({axis, now[axis], target});
    now[axis] = target;
  };

  // Innermost first: a part of a part goes before the part
  for (std::size_t axis = from.size(); axis-- > 0;) {
    const bool must_open =
        to[axis].is_shard() && outer_cuts_differ(now, to, axis, to[axis].dim);
    move(axis, must_open ? replicate() : to[axis]);
  }
  for (std::size_t axis = 0; axis < from.size(); ++axis) move(axis, to[axis]);
  return moves;
}

std::vector<Call> calls_of(const Placements& from, const Placements& to,
                           const Shape& global, const Shape& mesh,
                           const std::vector<std::int64_t>& coordinate) {
  std::vector<Call> calls;
  Placements now = from;
  for (const Move& move : moves_between(from, to)) {
    Call call;
    if (call_of(move, whole_along(move.axis, now, global, mesh, coordinate),
                mesh[move.axis], call)) {
      calls.push_back(call);
    }
    now[move.axis] = move.to;
  }
  return calls;
}

double wire_elements(const std::vector<Call>& calls, const Shape& mesh) {
  double elements = 0;
  for (const Call& call : calls) {
    CommRecord record;
    record.op = call.op;
    record.numel = call.numel;
    record.group_size = static_cast<int>(mesh[call.axis]);
    elements += shardbook::wire_elements(record);
  }
  return elements;
}

}  // namespace shardbook::dtensor
