// Tensors with fewer rows than ranks: some ranks hold nothing, and do what the
// others do.

#include <gtest/gtest.h>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

using OnTensors = std::function<Tensor(const Tensors&)>;
using OnDTensors = std::function<DTensor(const std::vector<DTensor>&)>;

struct Operation {
  std::string name;
  Tensors operands;  ///< integers get no gradient
  OnDTensors distributed;
  OnTensors plain;
};

/// One expression for both kinds of tensors.
template <typename Expression>
Operation of(const std::string& name, const Tensors& operands,
             const Expression& expression) {
  return {name, operands, expression, expression};
}

bool is_float(const Tensor& x) { return x.dtype() == DType::kF64; }

AttentionOptions two_heads() {
  AttentionOptions options;
  options.heads = 2;
  return options;
}

// All of one batch row, so an axis that cuts rows leaves ranks without any.
std::vector<Operation> operations() {
  const Tensor x = noise({1, 2, 4}, 1), y = noise({1, 2, 4}, 2);
  const Tensor weight = noise({4, 3}, 3), row = noise({4}, 4);
  const Tensor table = noise({3, 4}, 5);
  const Tensor ids =
      Tensor::from_values(std::vector<std::int64_t>{2, 0}, {1, 2});
  const Tensor targets =
      Tensor::from_values(std::vector<std::int64_t>{-100, 1}, {1, 2});
  const auto matmul_of = [](const auto& a) { return matmul(a[0], a[1]); };
  const auto linear_of = [](const Tensors& a) {
    return linear(a[0], a[1], {});
  };
  return {
      of("add", {x, row}, [](const auto& a) { return add(a[0], a[1]); }),
      of("mul", {x, y}, [](const auto& a) { return mul(a[0], a[1]); }),
      of("gelu", {x}, [](const auto& a) { return gelu(a[0]); }),
      of("dropout", {x}, [](const auto& a) { return dropout(a[0], 0.5); }),
      {"matmul", {x, weight}, matmul_of, linear_of},
      of("attention", {x, y, x},
         [](const auto& a) {
           return attention(a[0], a[1], a[2], two_heads());
         }),
      of("sum over a dim", {x}, [](const auto& a) { return sum(a[0], 0); }),
      of("mean over a dim", {x}, [](const auto& a) { return mean(a[0], 1); }),
      of("sum", {x}, [](const auto& a) { return sum(a[0]); }),
      of("mean", {x}, [](const auto& a) { return mean(a[0]); }),
      of("softmax", {x}, [](const auto& a) { return softmax(a[0]); }),
      of("layer_norm", {x, row, row},
         [](const auto& a) { return layer_norm(a[0], a[1], a[2]); }),
      of("cross_entropy", {x, targets},
         [](const auto& a) { return cross_entropy(a[0], a[1]); }),
      of("embedding", {table, ids},
         [](const auto& a) { return embedding(a[0], a[1]); }),
      of("transpose", {x}, [](const auto& a) { return transpose(a[0], 0, 2); }),
      of("reshape", {x}, [](const auto& a) {
        return reshape(a[0], {2, 4});
      })};
}

// The gradients of the sum of squares of the result, after the result.
Tensors run_plain(const Operation& op) {
  Tensors leaves;
  for (const Tensor& x : op.operands) {
    leaves.push_back(x.clone());
    if (is_float(x)) leaves.back().set_requires_grad();
  }
  RankContext::current().random = RandomState();
  const Tensor y = op.plain(leaves);
  sum(square(y)).backward();
  Tensors results = {y.detach()};
  for (const Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

// What differs from `expected`: "" if nothing does.
std::string differences(const Operation& op, const Tensors& expected,
                        const Mesh& mesh,
                        const std::vector<Placements>& layouts) {
  Tensors locals;
  std::vector<DTensor> operands;
  for (std::size_t i = 0; i < op.operands.size(); ++i) {
    const Tensor& x = op.operands[i];
    locals.push_back(block_of(x, local_part(x.shape(), layouts[i], mesh.shape(),
                                            mesh.coordinate()))
                         .clone());
    if (is_float(x)) locals.back().set_requires_grad();
    operands.push_back(from_local(locals[i], mesh, layouts[i], x.shape()));
  }
  RankContext::current().random = RandomState();
  const Tensor y = op.distributed(operands).full_tensor();
  sum(square(y)).backward();
  std::string wrong;
  if (!(error_between(y.detach(), expected[0]) < 1e-12)) wrong += " result";
  for (std::size_t i = 0; i < locals.size(); ++i) {
    if (!is_float(op.operands[i])) continue;
    const Tensor right =
        block_of(expected[i + 1], local_part(op.operands[i].shape(), layouts[i],
                                             mesh.shape(), mesh.coordinate()));
    if (!(error_between(locals[i].grad(), right) < 1e-12)) {
      wrong += " gradient " + std::to_string(i);
    }
  }
  return wrong;
}

class DTensorEmptyShards : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Meshes, DTensorEmptyShards,
                         testing::Values(std::vector<int>{3},
                                         std::vector<int>{2, 2}));

TEST_P(DTensorEmptyShards, OperationsEqualOneDevice) {
  const auto wrong = on_mesh(GetParam(), [](const Mesh& mesh, ProcessGroup&) {
    std::string wrong;
    for (const Operation& op : operations()) {
      const Tensors expected = run_plain(op);
      for (const Placements& layout : all_placements(
               {replicate(), shard(0), shard(1), shard(2)}, mesh.ndim())) {
        // A dim that an operand does not have is not cut
        std::vector<Placements> layouts;
        for (const Tensor& x : op.operands) {
          layouts.push_back(layout);
          for (Placement& each : layouts.back()) {
            if (each.dim >= x.ndim()) each = replicate();
          }
        }
        const std::string result = differences(op, expected, mesh, layouts);
        if (!result.empty()) {
          wrong += op.name + " " + text(layout) + ":" + result + "\n";
        }
      }
    }
    return wrong;
  });
  EXPECT_EQ(joined(wrong), "");
}

}  // namespace
}  // namespace shardbook::dtensor_test
