#pragma once

// What the notebook 11_dtensor calls: pictures of layouts, tables of changes
// and products, an MLP of one device to compare with, and whole trainings.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/11_dtensor/dtensor.h"
#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/11_dtensor/redistribute.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "core/ops.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// Which ranks of a mesh hold which parts of a matrix, for several layouts.
inline Picture layouts(const Shape& shape,
                       const std::vector<dtensor::Placements>& all,
                       const Shape& mesh) {
  return holders("The second axis cuts what the first one leaves",
                 mapped(all, [&](const dtensor::Placements& each) {
                   return dtensor::held_by("x", shape, each, mesh);
                 }));
}

// --- Changes of layout --------------------------------------------------------

/// Whole, cut by rows, cut by columns.
inline const dtensor::Placements kThree = {
    dtensor::replicate(), dtensor::shard(0), dtensor::shard(1)};

/// The calls that turn `from` into `to` on four ranks.
inline std::vector<dtensor::Call> calls_between(const dtensor::Placement& from,
                                                const dtensor::Placement& to,
                                                const Shape& shape) {
  return dtensor::calls_of({from}, {to}, shape, /*mesh=*/{4}, {0});
}

/// The collective of each change of an 8 x 8 matrix on four ranks.
inline Picture changes() {
  const auto row = [](const dtensor::Placement& from) {
    Cells row = {dtensor::text(from)};
    for (const dtensor::Placement& to : kThree) {
      const auto calls = calls_between(from, to, {8, 8});
      std::string text;
      for (const dtensor::Call& call : calls) {
        text += joined(comm_op_name(call.op), " ");
      }
      text += fixed(dtensor::wire_elements(calls, {4}), 0);
      row.push_back(calls.empty() ? "-" : text);
    }
    return row;
  };
  dtensor::Placements all = kThree;
  all.push_back(dtensor::partial());
  return table_of({"from", "to R", "to S(0)", "to S(1)"}, all, row);
}

/// A layout, what a rank sent for it, and how far its values are from those of
/// one device.
struct Result {
  std::string layout = "";
  double elements = 0, difference = 0;
};

inline std::string text_of(const Result& result) {
  return "difference " + fixed(result.difference, 6) + ", " +
         fixed(result.elements, 0) + " elements sent per rank\n";
}

// --- Products -----------------------------------------------------------------

/// Every pair of layouts of X and W on two ranks.
/// product(world, x, w) is the Result.
template <typename Product>
Picture products(const Product& product) {
  const auto row = [&](const dtensor::Placement& x) {
    Cells row = {dtensor::text(x)};
    double largest = 0;
    for (const dtensor::Placement& w : kThree) {
      const Result result = on_ranks(2, product, x, w)[0];
      largest = std::max(largest, result.difference);
      row.push_back(result.layout + ", " + fixed(result.elements, 0));
    }
    row.push_back(largest < 1e-12 ? "yes" : "NO");
    return row;
  };
  return table_of({"X", "W R", "W S(0)", "W S(1)", "all equal"}, kThree, row);
}

// --- Plans for an MLP -----------------------------------------------------------

/// Y = gelu(X W1) W2 on one device, with the gradients of the sum of squares.
struct Mlp {
  Tensor x, w1, w2, y;
};

inline Mlp one_device(std::int64_t tokens) {
  Mlp mlp;
  mlp.x = numbers({tokens, 16}, "x");
  mlp.w1 = numbers({16, 64}, "w1");
  mlp.w2 = numbers({64, 16}, "w2");
  mlp.w1.set_requires_grad();
  mlp.w2.set_requires_grad();
  mlp.y = matmul(gelu(matmul(mlp.x, mlp.w1)), mlp.w2);
  sum(square(mlp.y)).backward();
  return mlp;
}

struct Plan {
  double elements = 0;      ///< forward and backward
  double weight_share = 0;  ///< of both weights, on a rank
  double difference = 0;    ///< of Y and of the gradients
};

/// The largest difference, as a part of the largest number.
inline double relative(const Tensor& x, const Tensor& right) {
  return max_abs_difference(x, right) /
         max_abs_difference(right, right.zeros_like());
}

inline Tensor whole_gradient(const dtensor::Parameter& p) {
  return dtensor::from_local(p.local.grad(), p.mesh, p.placements, p.shape)
      .full_tensor();
}

/// After backward: what was sent, and what differs from one device.
inline Plan compare(ProcessGroup& world, const Mlp& mlp,
                    const dtensor::Parameter& w1, const dtensor::Parameter& w2,
                    const dtensor::DTensor& y) {
  Plan plan;
  plan.elements = sent_elements(world.records());
  plan.weight_share = double(w1.local.numel() + w2.local.numel()) /
                      double(mlp.w1.numel() + mlp.w2.numel());
  plan.difference = std::max({relative(y.full_tensor(), mlp.y),
                              relative(whole_gradient(w1), mlp.w1.grad()),
                              relative(whole_gradient(w2), mlp.w2.grad())});
  return plan;
}

/// Nine plans on four ranks: try_plan(world, mlp, w1, w2) is the Plan.
template <typename TryPlan>
Picture plans(std::int64_t tokens, const TryPlan& try_plan) {
  Rows rows = {{"W1", "W2", "elements sent", "weights on a rank", "equal"}};
  const auto run = [&](ProcessGroup& world, const dtensor::Placement& w1,
                       const dtensor::Placement& w2) {
    return try_plan(world, one_device(tokens), w1, w2);
  };
  for (const auto& w1 : kThree) {
    for (const auto& w2 : kThree) {
      const Plan plan = on_ranks(4, run, w1, w2)[0];
      rows.push_back({dtensor::text(w1), dtensor::text(w2),
                      fixed(plan.elements, 0), percent(plan.weight_share, 0),
                      plan.difference < 1e-12 ? "yes" : "NO"});
    }
  }
  return table(rows);
}

// --- Whole trainings --------------------------------------------------------------

/// GPT 1.3B on the shapes of 8 ranks of `textbook`: exposed communication with
/// all ranks on tp, where tokens move, and on dp, where weights move.
inline Picture tokens_or_weights(const std::vector<std::int64_t>& tokens) {
  std::vector<Bar> all;
  for (const std::int64_t each : tokens) {
    for (const char* mesh : {"1x8", "8x1"}) {
      const std::string line = joined(
          "11_dtensor --model gpt-1.3b --world-size 8 --batch 8 "
          "--no-check --mesh ",
          mesh, kTextbook, " --seq ", each / 8);
      all.push_back({joined(each, " tokens, ", mesh[0] == '1' ? "tp" : "fsdp"),
                     exposed_s(run(line))});
    }
  }
  return bars("Few tokens: move the tokens. Many: move the weights", all,
              {"ms", 1e-3}, "comm");
}

// --- Answers of the exercises -----------------------------------------------------

/// Of [7, 5] with (S(0), S(0)) on 2 x 3 ranks.
inline double rank_with_nothing() {
  for (int rank = 0; rank < 6; ++rank) {
    const dtensor::Block block =
        dtensor::local_part({7, 5}, {dtensor::shard(0), dtensor::shard(0)},
                            {2, 3}, {rank / 3, rank % 3});
    if (shape_numel(block.shape) == 0) return rank;
  }
  return -1;
}

/// Terms of [5, 8] on four ranks become S(0).
inline double scattered_elements() {
  return dtensor::wire_elements(
      calls_between(dtensor::partial(), dtensor::shard(0), {5, 8}), {4});
}

}  // namespace notes
