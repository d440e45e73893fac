#pragma once

// What the notebook 11_dtensor calls: pictures of layouts, tables of changes
// and products, an MLP of one device to compare with, and whole trainings.

#include <algorithm>
#include <cstdint>
#include <functional>
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
  std::vector<dtensor::Held> pictures;
  for (const dtensor::Placements& each : all) {
    pictures.push_back(dtensor::held_by("x", shape, each, mesh));
  }
  return holders("The second axis cuts what the first one leaves", pictures);
}

/// What this rank has put on the wire since clear_records().
inline double elements_sent(ProcessGroup& world) {
  return sent_elements(world.records());
}

// --- Changes of layout --------------------------------------------------------

/// Whole, cut by rows, cut by columns.
inline const dtensor::Placements kThree = {
    dtensor::replicate(), dtensor::shard(0), dtensor::shard(1)};

inline std::string calls_text(const dtensor::Placement& from,
                              const dtensor::Placement& to) {
  const Shape shape = {8, 8}, mesh = {4};
  const std::vector<dtensor::Call> calls =
      dtensor::calls_of({from}, {to}, shape, mesh, {0});
  if (calls.empty()) return "-";
  std::string text;
  for (const dtensor::Call& call : calls) {
    text += std::string(comm_op_name(call.op)) + " ";
  }
  return text + fixed(dtensor::wire_elements(calls, mesh), 0);
}

/// The collective of each change of an 8 x 8 matrix on four ranks.
inline Picture changes() {
  Rows rows = {{"from"}};
  for (const auto& to : kThree) rows[0].push_back("to " + dtensor::text(to));
  dtensor::Placements all = kThree;
  all.push_back(dtensor::partial());
  for (const auto& from : all) {
    rows.push_back({dtensor::text(from)});
    for (const auto& to : kThree) rows.back().push_back(calls_text(from, to));
  }
  return table(rows);
}

/// Against the tensor of one device.
struct Change {
  double difference = 0, elements = 0;
};

inline std::string text_of(const Change& change) {
  return "difference " + fixed(change.difference, 6) + ", " +
         fixed(change.elements, 0) + " elements sent per rank\n";
}

// --- Products -----------------------------------------------------------------

/// The layout of a result, and what its rank sent for it.
struct Product {
  std::string layout = "";
  double elements = 0, difference = 0;
};
using MakeProduct =
    std::function<Product(ProcessGroup& world, const dtensor::Placement& of_x,
                          const dtensor::Placement& of_w)>;

/// Every pair of layouts of X and W on two ranks.
inline Picture products(const MakeProduct& product) {
  Rows rows = {{"X"}};
  for (const auto& w : kThree) rows[0].push_back("W " + dtensor::text(w));
  rows[0].push_back("all equal");
  for (const auto& x : kThree) {
    rows.push_back({dtensor::text(x)});
    double largest = 0;
    for (const auto& w : kThree) {
      const Product result = on_ranks(2, product, x, w)[0];
      largest = std::max(largest, result.difference);
      rows.back().push_back(result.layout + ", " + fixed(result.elements, 0));
    }
    rows.back().push_back(largest < 1e-12 ? "yes" : "NO");
  }
  return table(rows);
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
using TryPlan = std::function<Plan(ProcessGroup& world, const Mlp& mlp,
                                   const dtensor::Placement& of_w1,
                                   const dtensor::Placement& of_w2)>;

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
  plan.elements = elements_sent(world);
  plan.weight_share = double(w1.local.numel() + w2.local.numel()) /
                      double(mlp.w1.numel() + mlp.w2.numel());
  plan.difference = std::max({relative(y.full_tensor(), mlp.y),
                              relative(whole_gradient(w1), mlp.w1.grad()),
                              relative(whole_gradient(w2), mlp.w2.grad())});
  return plan;
}

/// Nine plans on four ranks.
inline Picture plans(std::int64_t tokens, const TryPlan& try_plan) {
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

/// The smallest GPT on four ranks.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 4 --batch 8 --seq 32 --steps 6";

/// GPT 1.3B on the shapes of 8 ranks of `textbook`: exposed communication with
/// all ranks on tp, where tokens move, and on dp, where weights move.
inline Picture tokens_or_weights(const std::vector<std::int64_t>& tokens) {
  std::vector<Bar> all;
  for (const std::int64_t each : tokens) {
    for (const char* mesh : {"1x8", "8x1"}) {
      const Report report = run(
          joined("11_dtensor --backend sim --cluster textbook --model gpt-1.3b "
                 "--data random --world-size 8 --batch 8 --no-check --mesh ",
                 mesh, " --seq ", each / 8));
      all.push_back({joined(each, " tokens, ", mesh[0] == '1' ? "tp" : "fsdp"),
                     report.time.exposed_comm_s});
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
  const Shape mesh = {4};
  return dtensor::wire_elements(
      dtensor::calls_of({dtensor::partial()}, {dtensor::shard(0)}, {5, 8}, mesh,
                        {0}),
      mesh);
}

}  // namespace notes
